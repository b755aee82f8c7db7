"""The HTTP face: routes, request checks, chat template, text assembly and SSE. Knows workers only through ``Backend``."""
