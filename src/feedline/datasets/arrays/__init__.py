"""Datasets of aligned arrays: `.npy` files, HDF5, Zarr, memory."""
