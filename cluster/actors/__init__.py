"""All Ray calls live here: actors, their handles, the local cluster. Nothing else imports ``ray``."""
