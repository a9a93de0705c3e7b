"""`feedline inspect`: what folders and shards of any format hold, a picture of it, and what an order of it costs."""
