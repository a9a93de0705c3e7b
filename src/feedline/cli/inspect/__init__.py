"""`feedline inspect`: what folders and tar shards hold, a picture of it, and what an order of it costs."""
