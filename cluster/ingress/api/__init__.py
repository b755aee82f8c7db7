"""The HTTP face: routes, request checks, chat template, text and SSE. Knows workers only through ``Backend``."""
