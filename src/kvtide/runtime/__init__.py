"""The threads, buffers and deadlines that carry out what the core decides."""
