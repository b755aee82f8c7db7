"""The decoder in C++, compiled on the machine that runs it; ``workers.model.native_decoder`` drives it."""
