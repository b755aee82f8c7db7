"""YAML files beside the configuration (keys, tools): read whole, bounded, with errors that name the file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cluster.config import ConfigError


def read_yaml(path: Path, *, max_bytes: int) -> Any:
    """Returns the content of a file; an empty one is ``{}``. Raises: ConfigError.

    What the file says is in no message: it may be secret.
    """
    where = str(path)
    try:
        if path.stat().st_size > max_bytes:
            raise ConfigError("", None, f"the file is larger than {max_bytes} bytes", where)
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError("", None, "the file is not UTF-8 text", where) from error
    except OSError as error:
        raise ConfigError("", None, f"cannot be read: {error.strerror}", where) from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError("", None, "not valid YAML", f"{where}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError("", None, "not valid YAML", where) from None
    return {} if value is None else value
