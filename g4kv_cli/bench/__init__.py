"""Measuring the kernels: what is run (workloads), how it is timed (sweep, cuda_backend, harness), what follows from it
(roofline, verdict, compare), and other libraries' kernels beside ours (peers)."""
