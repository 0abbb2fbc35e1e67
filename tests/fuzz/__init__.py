"""Fuzz targets: what hostile bytes may do to each reader of martlet. scripts/fuzz.py runs them.

A Python target is a module with `run(data)`, which lets nothing out but a bug, and `seeds()`, which
has inputs to begin with. Those in C are *.c here, for libFuzzer; csrc/CMakeLists.txt builds them.
"""
