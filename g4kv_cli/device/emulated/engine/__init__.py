"""The native engine: launches as bytecode for handlers in C, with the interpreter as its reference and reporter.

A kernel is lowered (``lower``) to operations of named handlers, its registers get places in a frame that each warp has
one of (``frame``), and both are bound to the compiled library (``program``). ``launch`` runs it. The C side (``c/``)
says in ``engine.h`` how it works. What is not known here is refused as a whole by ``NotLowered``, and such a kernel
runs on the interpreter.

A rule that a launch breaks is only detected: the stores are taken back, and the interpreter runs the launch again and
writes the report, so that every message, order and count has one home.
"""
