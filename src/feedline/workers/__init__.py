"""Where batch builders run: inline, threads, processes, one file each."""
