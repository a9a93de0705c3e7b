"""Live streams: message brokers, sockets and databases, read as partitions."""
