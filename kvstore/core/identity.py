"""Which computation a KV block belongs to: the fingerprint, and the hash that names a block.

Owns nothing; pure functions and one frozen structure. A block may be used only by a reader whose fingerprint is
identical in every field: one difference and the block does not exist for that reader. When two
fingerprints differ, the answer says in which fields.

Every hash is BLAKE2b-256 over tagged, length-prefixed fields, so that "ab" + "c" never equals "a" + "bc" and an
adapter named X never equals a tenant salt X. An absent salt and an empty salt are two different salts. Nothing
depends on the process: no ``hash()``, no dictionary order, no native byte order.

Byte layout of one field: tag (1 byte), length n of the value (8 bytes, little endian), value (n bytes).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvstore.core.ids import BLOCK_HASH_BYTES, BlockHash
from kvstore.errors import BadInput

FINGERPRINT_DIGEST_BYTES = 32
MAX_FIELD_CHARS = 4096
MAX_ADAPTERS = 64

_PERSON_FINGERPRINT = b"kopir-fprint-1"
_PERSON_BLOCK = b"kopir-block-1"

# Tags of the fields of a block hash. A tag is never reused for another meaning.
_TAG_FINGERPRINT = 1
_TAG_TENANT_SALT = 2
_TAG_PARENT = 3
_TAG_TOKENS = 4

# Tags of the fields of a fingerprint.
_TAG_NAME = 16
_TAG_TEXT = 17
_TAG_NUMBER = 18
_TAG_LIST = 19

_TOKEN_BYTES = 4
_FIELD_HEADER = struct.Struct("<BQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that must be identical before a KV block can be used. Compared field by field, never by name."""

    weights_digest: str
    weights_epoch: int = 0
    """Raised by one with every change of the weights in place, whose digest nobody computed anew."""
    quantization: str = "none"
    tokenizer_digest: str
    chat_template_digest: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    attention: str = "full"
    """``full``, or the text of a window or QK-norm setting that changes what attention computes."""
    rope: str
    """Canonical text of every rope setting (theta, scaling, positions), see ``canonical_text``."""
    kv_dtype: str
    block_tokens: int
    kv_layout: str
    """Order of the axes inside a block, for example ``layer,kv,head,token,dim``."""
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    adapters: tuple[str, ...] = ()
    """Digests of the adapters in the order in which they are applied."""
    numerics: str
    """Which promise about rounding the producer kept, for example ``batch-invariant/torch-cpu``."""

    def __post_init__(self) -> None:
        """Raises: BadInput naming the first field of a wrong type or size."""
        for name in _FIELD_NAMES:
            _check_field(name, getattr(self, name))

    def to_dict(self) -> dict[str, str]:
        """Returns every field as text, for messages. ``adapters`` is a JSON list."""
        return {name: _field_to_text(getattr(self, name)) for name in _FIELD_NAMES}

    @classmethod
    def from_dict(cls, texts: Mapping[str, str]) -> Fingerprint:
        """Returns the fingerprint that ``to_dict`` described.

        Raises: BadInput naming the first field that is missing, unknown or not what its type needs.
        """
        for name in texts:
            if name not in _FIELD_TYPES:
                raise BadInput(name, texts[name], "unknown fingerprint field")
        values: dict[str, Any] = {}
        for name in _FIELD_NAMES:
            if name not in texts:
                raise BadInput(name, None, "missing fingerprint field")
            values[name] = _field_from_text(name, texts[name])
        return cls(**values)

    def canonical_bytes(self) -> bytes:
        """Returns the tagged, length-prefixed bytes that the digest covers; equal exactly when all fields are."""
        parts: list[bytes] = []
        for name in _FIELD_NAMES:
            parts.append(_field(_TAG_NAME, name.encode()))
            value = getattr(self, name)
            if isinstance(value, tuple):
                items = b"".join(_field(_TAG_TEXT, item.encode()) for item in value)
                parts.append(_field(_TAG_LIST, items))
            elif isinstance(value, int):
                parts.append(_field(_TAG_NUMBER, str(value).encode()))
            else:
                parts.append(_field(_TAG_TEXT, value.encode()))
        return b"".join(parts)

    def digest(self) -> bytes:
        """Returns 32 bytes that stand for this fingerprint inside block hashes."""
        return hashlib.blake2b(
            self.canonical_bytes(), digest_size=FINGERPRINT_DIGEST_BYTES, person=_PERSON_FINGERPRINT
        ).digest()


_FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Fingerprint))
_FIELD_TYPES: dict[str, type] = {
    field.name: {"int": int, "str": str}.get(str(field.type), tuple) for field in fields(Fingerprint)
}


def differences(a: Fingerprint, b: Fingerprint) -> tuple[str, ...]:
    """Returns the names of the fields in which two fingerprints differ, in field order; empty means usable."""
    return tuple(name for name in _FIELD_NAMES if getattr(a, name) != getattr(b, name))


def text_differences(mine: Fingerprint, theirs: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the fields in which ``theirs`` (made by any version's ``to_dict``) differs from mine.

    A field that only one side knows differs. Never raises, so that a refusal can always name its fields.
    """
    texts = mine.to_dict()
    known = tuple(name for name in _FIELD_NAMES if theirs.get(name) != texts[name])
    return known + tuple(sorted(name for name in theirs if name not in texts))


def canonical_text(settings: Mapping[str, Any]) -> str:
    """Returns one text for a mapping of JSON values: keys sorted, no spaces; equal mappings give equal texts."""
    return json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)


def block_hash(
    fingerprint_digest: bytes, tenant_salt: bytes | None, parent_hash: BlockHash | None, token_ids: Sequence[int]
) -> BlockHash:
    """Returns the 32-byte name of one block: its tokens, everything before them, whose they are, who computed them.

    ``tenant_salt`` None means no salt, which is not the same as an empty one. ``parent_hash`` is None for the
    first block. Raises: BadInput for a token id outside [0, 2**32) or a parent of the wrong size.
    """
    if parent_hash is not None and len(parent_hash) != BLOCK_HASH_BYTES:
        raise BadInput("parent_hash", parent_hash, f"must have {BLOCK_HASH_BYTES} bytes")
    root = _root(fingerprint_digest, tenant_salt)
    return _chain(root, parent_hash, _token_bytes(token_ids))


def prefix_hashes(
    fingerprint_digest: bytes, tenant_salt: bytes | None, token_ids: Sequence[int], block_tokens: int
) -> list[BlockHash]:
    """Returns the hashes of the full blocks of a token sequence, first block first; a partial tail has none.

    Item i names the tokens [0, (i + 1) * block_tokens). Raises: BadInput for a bad token id or block size.
    """
    if block_tokens < 1:
        raise BadInput("block_tokens", block_tokens, "must be at least 1")
    num_blocks = len(token_ids) // block_tokens
    packed = _token_bytes(token_ids[: num_blocks * block_tokens])
    root = _root(fingerprint_digest, tenant_salt)
    stride = block_tokens * _TOKEN_BYTES
    hashes: list[BlockHash] = []
    parent: BlockHash | None = None
    for start in range(0, len(packed), stride):
        parent = _chain(root, parent, packed[start : start + stride])
        hashes.append(parent)
    return hashes


def _root(fingerprint_digest: bytes, tenant_salt: bytes | None) -> hashlib.blake2b:
    """Returns the hash state that all blocks of one fingerprint and tenant begin with."""
    if len(fingerprint_digest) != FINGERPRINT_DIGEST_BYTES:
        raise BadInput("fingerprint_digest", fingerprint_digest, f"must have {FINGERPRINT_DIGEST_BYTES} bytes")
    root = hashlib.blake2b(digest_size=BLOCK_HASH_BYTES, person=_PERSON_BLOCK)
    root.update(_field(_TAG_FINGERPRINT, fingerprint_digest))
    if tenant_salt is not None:
        root.update(_field(_TAG_TENANT_SALT, tenant_salt))
    return root


def _chain(root: hashlib.blake2b, parent_hash: BlockHash | None, packed_tokens: bytes) -> BlockHash:
    state = root.copy()
    tokens = _field(_TAG_TOKENS, packed_tokens)
    state.update(tokens if parent_hash is None else _field(_TAG_PARENT, parent_hash) + tokens)
    return BlockHash(state.digest())


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        bad = next((token for token in token_ids if not _is_token_id(token)), None)
        raise BadInput("token_ids", bad, "a token id must be an integer in [0, 2**32)") from error


def _is_token_id(token: object) -> bool:
    return isinstance(token, int) and 0 <= token < 1 << 32


def _field(tag: int, value: bytes) -> bytes:
    return _FIELD_HEADER.pack(tag, len(value)) + value


def _check_field(name: str, value: object) -> None:
    expected = _FIELD_TYPES[name]
    if type(value) is not expected:
        raise BadInput(name, value, f"must be {expected.__name__}")
    if isinstance(value, int) and value < 0:
        raise BadInput(name, value, "must not be negative")
    if isinstance(value, tuple) and (len(value) > MAX_ADAPTERS or not all(type(item) is str for item in value)):
        raise BadInput(name, value, f"must be at most {MAX_ADAPTERS} texts")
    texts = value if isinstance(value, tuple) else (value,)
    if any(isinstance(text, str) and len(text) > MAX_FIELD_CHARS for text in texts):
        raise BadInput(name, value, f"must have at most {MAX_FIELD_CHARS} characters")


def _field_to_text(value: str | int | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value), separators=(",", ":"))
    return str(value)


def _field_from_text(name: str, text: str) -> str | int | tuple[str, ...]:
    kind = _FIELD_TYPES[name]
    if kind is str:
        return text
    try:
        if kind is int:
            return int(text)
        return tuple(json.loads(text))
    except (ValueError, TypeError) as error:
        raise BadInput(name, text, "cannot be read as a fingerprint field") from error
