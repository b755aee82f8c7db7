"""The disk tier of a store node: one file of fixed slots, its format, its I/O and its driver."""
