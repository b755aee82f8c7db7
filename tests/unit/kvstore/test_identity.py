"""Block hashes and fingerprints: stable everywhere, different whenever anything that matters differs."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.identity import (
    Fingerprint,
    block_hash,
    canonical_text,
    differences,
    prefix_hashes,
    text_differences,
)
from kvstore.core.ids import BlockHash
from kvstore.errors import BadInput

TOKENS = tuple(range(100, 132))


def make_fingerprint(**changes: object) -> Fingerprint:
    values: dict[str, object] = {
        "weights_digest": "w0",
        "tokenizer_digest": "t0",
        "chat_template_digest": "c0",
        "model_type": "llama",
        "num_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_kv_heads": 3,
        "head_size": 64,
        "rope": canonical_text({"theta": 100000.0, "scaling": None}),
        "kv_dtype": "bfloat16",
        "block_tokens": 16,
        "kv_layout": "layer,kv,head,token,dim",
        "numerics": "batch-invariant/torch-cpu",
    }
    return Fingerprint(**{**values, **changes})  # type: ignore[arg-type]


def changed(value: object) -> object:
    """Returns another value of the same type."""
    if isinstance(value, tuple):
        return (*value, "another")
    return value + 1 if isinstance(value, int) else f"{value}x"


FIELD_NAMES = [field.name for field in dataclasses.fields(Fingerprint)]


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_one_field_is_enough_to_make_the_block_another_one(name: str) -> None:
    """A difference in any single field is named, changes the digest and changes every block hash."""
    mine = make_fingerprint()
    theirs = dataclasses.replace(mine, **{name: changed(getattr(mine, name))})
    assert differences(mine, theirs) == (name,)
    assert text_differences(mine, theirs.to_dict()) == (name,)
    assert mine.digest() != theirs.digest()
    mine_hashes = prefix_hashes(mine.digest(), None, TOKENS, 16)
    their_hashes = prefix_hashes(theirs.digest(), None, TOKENS, 16)
    assert not set(mine_hashes) & set(their_hashes)


def test_equal_fingerprints_have_no_differences_and_survive_their_text_form() -> None:
    """``from_dict(to_dict(x))`` and a pickle are the same fingerprint with the same digest."""
    mine = make_fingerprint(adapters=("b", "a"))
    for other in (Fingerprint.from_dict(mine.to_dict()), pickle.loads(pickle.dumps(mine))):
        assert other == mine
        assert differences(mine, other) == ()
        assert other.digest() == mine.digest()


def test_the_order_of_adapters_is_part_of_the_fingerprint() -> None:
    """Two adapters applied the other way round are another computation."""
    assert differences(make_fingerprint(adapters=("a", "b")), make_fingerprint(adapters=("b", "a"))) == ("adapters",)
    assert make_fingerprint(adapters=("a", "b")).digest() != make_fingerprint(adapters=("b", "a")).digest()
    assert make_fingerprint(adapters=("ab", "c")).digest() != make_fingerprint(adapters=("a", "bc")).digest()


def test_values_do_not_flow_from_one_field_into_the_next() -> None:
    """ "ab" + "c" is not "a" + "bc", in neighbouring fields of the fingerprint."""
    one = make_fingerprint(weights_digest="ab", quantization="c")
    other = make_fingerprint(weights_digest="a", quantization="bc")
    assert one.digest() != other.digest()


def test_a_refusal_names_fields_that_only_one_side_knows() -> None:
    """Another version's fingerprint is refused by field name, not by an error."""
    mine = make_fingerprint()
    theirs = mine.to_dict()
    del theirs["rope"]
    theirs["sliding_window"] = "4096"
    assert text_differences(mine, theirs) == ("rope", "sliding_window")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", "many"), ("num_layers", "-1"), ("adapters", "{"), ("adapters", "[1]"), ("surprise", "x")],
)
def test_a_bad_text_form_is_refused_by_field(name: str, value: str) -> None:
    """A value that cannot be read raises BadInput with the field."""
    with pytest.raises(BadInput) as caught:
        Fingerprint.from_dict({**make_fingerprint().to_dict(), name: value})
    assert caught.value.field == name


def test_a_missing_field_is_refused() -> None:
    """No field has a silent default on the wire."""
    texts = make_fingerprint().to_dict()
    del texts["quantization"]
    with pytest.raises(BadInput) as caught:
        Fingerprint.from_dict(texts)
    assert caught.value.field == "quantization"


def test_a_value_of_the_wrong_type_is_refused() -> None:
    """A boolean is not a number and a list is not a tuple."""
    for name, value in (("num_layers", True), ("adapters", ["a"]), ("weights_digest", b"w")):
        with pytest.raises(BadInput) as caught:
            make_fingerprint(**{name: value})
        assert caught.value.field == name


# --- block hashes -------------------------------------------------------------------------------------------

GOLDEN_FINGERPRINT = "f74b276c8753ceeaa8ccb5bd56554a854eb9d7764a58191fa6667abddb39b1de"
GOLDEN_FIRST = "4076666d8474a9163a7f16974d05b2a292c8f13c3d9ff8558d164c53a5bf4b24"
GOLDEN_SECOND = "5cb5e6019211433fb4156451e24ffe544f854d12ea5de2779796e2a4ea8da69e"
GOLDEN_SALTED = "f4bc7af706a6053f40cb8ebc6288a192864d77dcb20605190a972198ea8ef118"


def test_hashes_have_their_golden_values() -> None:
    """The bytes that are hashed never change by accident: stored blocks would be lost."""
    digest = make_fingerprint(adapters=("x", "y")).digest()
    assert digest.hex() == GOLDEN_FINGERPRINT
    assert [value.hex() for value in prefix_hashes(digest, None, TOKENS, 16)] == [GOLDEN_FIRST, GOLDEN_SECOND]
    assert block_hash(digest, b"salt", None, TOKENS[:16]).hex() == GOLDEN_SALTED


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_hashes_do_not_depend_on_the_process(hash_seed: str) -> None:
    """A process with another PYTHONHASHSEED computes the golden value."""
    program = (
        "from test_identity import make_fingerprint, TOKENS\n"
        "from kvstore.core.identity import prefix_hashes\n"
        "d = make_fingerprint(adapters=('x', 'y')).digest()\n"
        "print(d.hex(), *[h.hex() for h in prefix_hashes(d, None, TOKENS, 16)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.split() == [GOLDEN_FINGERPRINT, GOLDEN_FIRST, GOLDEN_SECOND]


def test_an_adapter_never_equals_a_salt() -> None:
    """F12: every pair of (adapters, salt) that a sloppy key would merge has blocks of its own."""
    cases: list[tuple[tuple[str, ...], bytes | None]] = [
        ((), None), ((), b""), (("X",), None), ((), b"X"), (("X",), b""), (("ab",), b"c"), (("a",), b"bc"),
        (("a", "b"), None), (("a",), b"b"), (("ab",), None), (("",), None), (("", ""), None),
    ]  # fmt: skip
    hashes = [
        tuple(prefix_hashes(make_fingerprint(adapters=adapters).digest(), salt, TOKENS, 16)) for adapters, salt in cases
    ]
    for one, other in itertools.combinations(range(len(cases)), 2):
        assert not set(hashes[one]) & set(hashes[other]), (cases[one], cases[other])
    control = prefix_hashes(make_fingerprint(adapters=("X",)).digest(), None, TOKENS, 16)
    assert tuple(control) == hashes[2]


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=80), st.integers(1, 20))
def test_prefix_hashes_chain_full_blocks_only(token_ids: list[int], block_tokens: int) -> None:
    """Item i is the block hash of tokens [i * n, (i + 1) * n) after item i - 1; the tail has no hash."""
    digest = make_fingerprint().digest()
    expected: list[BlockHash] = []
    for index in range(len(token_ids) // block_tokens):
        tokens = token_ids[index * block_tokens : (index + 1) * block_tokens]
        expected.append(block_hash(digest, b"s", expected[-1] if expected else None, tokens))
    assert prefix_hashes(digest, b"s", token_ids, block_tokens) == expected


def test_a_parent_changes_everything_after_it() -> None:
    """The same tokens after other tokens are another block."""
    digest = make_fingerprint().digest()
    one = prefix_hashes(digest, None, (1, *TOKENS[1:]), 16)
    other = prefix_hashes(digest, None, (2, *TOKENS[1:]), 16)
    assert one[1] != other[1]


@pytest.mark.parametrize("bad", [-1, 1 << 32, "x", 1.5])
def test_a_bad_token_id_is_refused(bad: object) -> None:
    """A token id outside [0, 2**32) is the caller's mistake, named with its value."""
    with pytest.raises(BadInput) as caught:
        prefix_hashes(make_fingerprint().digest(), None, [1, bad], 2)  # type: ignore[list-item]
    assert (caught.value.field, caught.value.value) == ("token_ids", bad)


def test_hashing_8000_tokens_takes_milliseconds() -> None:
    """Identity must not be felt in TTFT: the best of five runs stays under 10 ms."""
    digest = make_fingerprint().digest()
    token_ids = list(range(8000))
    durations_ns = []
    for _ in range(5):
        start_ns = time.perf_counter_ns()
        prefix_hashes(digest, b"", token_ids, 16)
        durations_ns.append(time.perf_counter_ns() - start_ns)
    assert min(durations_ns) < 10_000_000, durations_ns
