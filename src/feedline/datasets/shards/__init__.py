"""Datasets of shards: TFRecord, MDS and LitData."""
