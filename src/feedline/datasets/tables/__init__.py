"""Datasets of Parquet, Arrow and Hugging Face tables."""
