"""Other systems measured beside Kopir, each in an environment of its own. See ``environments`` and ``drive``."""
