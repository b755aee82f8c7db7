"""One status from the shares of several ingresses."""

from __future__ import annotations

from cluster.ingress.app import joined


def test_lists_follow_each_other_and_counts_add_up() -> None:
    """An ingress that does not answer contributes its name and nothing else."""
    mine = {
        "ingress": [{"id": "a", "pid": 1, "streams": 2}],
        "streams": [{"request_id": "r1"}, {"request_id": "r2"}],
        "interruptions": [{"request_id": "r0", "age_s": 5.0}],
        "promises": {"missed_deadlines": 1},
        "tokens": {"generated_tokens": 7, "delivered_tokens": 7},
    }
    theirs = {
        "ingress": [{"id": "b", "pid": 2, "streams": 0}],
        "streams": [],
        "interruptions": [{"request_id": "r9", "age_s": 1.0}],
        "promises": {"missed_deadlines": 2},
        "tokens": {"generated_tokens": 3, "delivered_tokens": 0},
    }
    silent = {"ingress": [{"id": "c", "pid": None, "streams": None}]}
    whole = joined([mine, theirs, silent])
    assert [one["id"] for one in whole["ingress"]] == ["a", "b", "c"]
    assert [one["request_id"] for one in whole["streams"]] == ["r1", "r2"]
    assert [one["request_id"] for one in whole["interruptions"]] == ["r9", "r0"]
    assert whole["promises"] == {"missed_deadlines": 3}
    assert whole["tokens"] == {"generated_tokens": 10, "delivered_tokens": 7}
    assert mine["streams"] == [{"request_id": "r1"}, {"request_id": "r2"}], "the shares stay as they are"


def test_no_share_is_an_empty_status() -> None:
    """The keys are there all the same."""
    assert joined([]) == {"ingress": [], "streams": [], "interruptions": [], "promises": {}, "tokens": {}}
