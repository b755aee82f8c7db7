"""The router's policy on failures: what may be repeated, and what must not.

Pure data and its checks. Most of it cannot be chosen: the keys are there so that application and operations agree in
writing on what happens, and a file that says something else is refused. What can be chosen is whether and how often a
request runs again before its first delta, and at what price.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cluster.config_schema import Count, Section, doc
from kvstore.errors import BadInput

Requirement = Literal["source_attempt_fenced", "retry_budget_available"]
REQUIREMENTS: tuple[Requirement, ...] = ("source_attempt_fenced", "retry_budget_available")
_WHY_REQUIRED = {
    "source_attempt_fenced": "without it two attempts could publish to one request",
    "retry_budget_available": "without it a mass failure becomes a flood of repeated prefills",
}
DIGEST_CHARACTERS = 12


class BeforeFirstDelta(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The client has received nothing."""

    require: Annotated[
        tuple[Requirement, ...], doc("What must hold before the request runs again; both are always required.")
    ] = REQUIREMENTS
    action: Annotated[
        Literal["retry_prefill_on_healthy_replica", "return_error"],
        doc("Run again on another pair of workers, or answer with an error at once."),
    ] = "retry_prefill_on_healthy_replica"
    max_attempts: Annotated[
        Annotated[int, Meta(ge=1, le=16)], doc("Attempts of one request, the first one included.")
    ] = 2
    max_reprefill_tokens: Annotated[
        Count | None, doc("A retry that would compute more prompt tokens is refused; `null` for no limit.")
    ] = None


class AfterFirstDelta(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The client has received something: nothing is run again."""

    action: Annotated[Literal["terminate_stream"], doc("The stream ends.")] = "terminate_stream"
    client_error: Annotated[Literal["upstream_decode_interrupted"], doc("The code of its last event.")] = (
        "upstream_decode_interrupted"
    )
    automatic_retry: Annotated[bool, doc("Must be `false`.")] = False


class UncertainSourceLiveness(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nobody knows whether the old attempt still runs."""

    action: Annotated[Literal["fence_source_attempt"], doc("Its lease is revoked.")] = "fence_source_attempt"
    wait_for: Annotated[Literal["cancel_ack_or_lease_expiry"], doc("Until one of both it counts as alive.")] = (
        "cancel_ack_or_lease_expiry"
    )
    then: Annotated[
        Literal["retry_only_if_no_delta_was_sent"], doc("As `before_first_delta` or `after_first_delta` say.")
    ] = "retry_only_if_no_delta_was_sent"


class OnUpstreamFailure(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker is gone, cut off, or faulty."""

    before_first_delta: BeforeFirstDelta = BeforeFirstDelta()
    after_first_delta: AfterFirstDelta = AfterFirstDelta()
    uncertain_source_liveness: UncertainSourceLiveness = UncertainSourceLiveness()


class Policy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy in force. Frozen for a request when it is admitted."""

    version: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)] | None, doc("Your name of this version; in every journal.")
    ] = None
    on_upstream_failure: OnUpstreamFailure = OnUpstreamFailure()

    @property
    def max_attempts(self) -> int:
        """Attempts of one request, the first one included."""
        before = self.on_upstream_failure.before_first_delta
        return before.max_attempts if before.action == "retry_prefill_on_healthy_replica" else 1

    @property
    def max_reprefill_tokens(self) -> int | None:
        """Prompt tokens that a retry may compute at most; None for no limit."""
        return self.on_upstream_failure.before_first_delta.max_reprefill_tokens

    @property
    def digest(self) -> str:
        """Names the content: equal for equal policies, whatever file they came from."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:DIGEST_CHARACTERS]


def check_policy(policy: Policy) -> None:
    """Checks what no single key can say. Raises: BadInput naming the key and why."""
    before = policy.on_upstream_failure.before_first_delta
    for requirement in REQUIREMENTS:
        if requirement not in before.require:
            raise BadInput(
                "on_upstream_failure.before_first_delta.require",
                list(before.require),
                f"{requirement} is missing: {_WHY_REQUIRED[requirement]}",
            )
    if len(set(before.require)) != len(before.require):
        raise BadInput("on_upstream_failure.before_first_delta.require", list(before.require), "says one thing twice")
    if policy.on_upstream_failure.after_first_delta.automatic_retry:
        raise BadInput(
            "on_upstream_failure.after_first_delta.automatic_retry",
            True,
            "must be false: what a client has read is never generated again behind its back",
        )


def policy_of_attempts(max_attempts: int, max_reprefill_tokens: int | None) -> Policy:
    """Returns the policy of a configuration that names no file."""
    before = BeforeFirstDelta(max_attempts=max_attempts, max_reprefill_tokens=max_reprefill_tokens)
    return Policy(on_upstream_failure=OnUpstreamFailure(before_first_delta=before))
