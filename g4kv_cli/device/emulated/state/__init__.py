"""What a launch consists of, below all that works on it: lanes and groups of them, the arena of device memory, the log
of stores, and the faults that were found."""
