"""Policies by name, and `--policy`. Only `optimizers/`, which this does not import, needs torch."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any, TypeVar

from fxpipe.errors import PolicyError, near
from fxpipe.options import option
from fxpipe.policy.base import Policy, PredictingPolicy, sees
from fxpipe.policy.costs import copies
from fxpipe.policy.double_buffer import DoubleBuffer
from fxpipe.policy.latest import Latest
from fxpipe.policy.lwp import LinearWeightPrediction
from fxpipe.policy.pipeoptim import PipeOptim
from fxpipe.policy.repair import REPAIRS
from fxpipe.policy.spectrain import SpecTrain
from fxpipe.policy.stash import Stash
from fxpipe.policy.vertical import Vertical
from fxpipe.policy.xgrad import XGrad
from fxpipe.policy.xpipe import XPipe
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import most_missed

POLICIES: dict[str, type[Policy]] = {
    kind.name: kind
    for kind in (Latest, Stash, Vertical, DoubleBuffer, SpecTrain, PipeOptim, XPipe, XGrad, LinearWeightPrediction)
}

_Kind = TypeVar("_Kind", bound=type[Policy])


def register(kind: _Kind) -> _Kind:
    """A class decorator: from now on, `--policy` knows this policy by its name.

    If it is in a model file, every worker of a run knows it, because every worker imports that file.

    Raises:
        PolicyError: it has no name, a name that fxpipe's own policies have, or an option that is not a switch or has
            the name of a repair; or one of its methods takes other arguments than that of `Policy`.
    """
    name = getattr(kind, "name", "")
    if not name or "+" in name:
        raise PolicyError(f"{kind.__name__} has no name", hint='name: ClassVar[str] = "…", without a +')
    if name in POLICIES and POLICIES[name].__module__.startswith(f"{__name__}."):
        raise PolicyError(f"there is already a policy '{name}'", hint=f"give {kind.__name__} another name")
    for field in fields(kind):
        if field.name in REPAIRS:
            what = f"option '{field.name}' of policy '{name}' has the name of a repair, which every policy has"
            raise PolicyError(what, hint="give it another name")
        if field.name != "repairs" and not isinstance(field.default, bool):
            raise PolicyError(
                f"option '{field.name}' of policy '{name}' is not a switch", hint="its default must be True or False"
            )
    for method in ("lag", "ahead", "read_as", "check"):
        form, base = (signature(getattr(class_, method)) for class_ in (kind, Policy))
        try:
            form.bind(*base.parameters)
        except TypeError as error:
            raise PolicyError(
                f"policy '{name}': {method}{form} cannot be called as fxpipe calls it", hint=f"def {method}{base}"
            ) from error
    POLICIES[name] = kind
    return kind


def make(text: str) -> Policy:
    """The policy that a text names, with its options after it: `latest`, `pipeoptim+keep`, `lwp+ef`.

    Raises:
        PolicyError: no policy has this name, or it has no such option.
    """
    name, *options = text.split("+")
    if name not in POLICIES:
        raise PolicyError(
            f"there is no policy '{name}'{near(name, POLICIES)}",
            hint=f"give one of: {', '.join(POLICIES)}, or one that the model file registers; options follow a plus: "
            "pipeoptim+keep",
        )
    options_of_policy = POLICIES[name].options()
    for switch in options:
        if not switch:
            raise PolicyError(f"'{text}' lacks an option after +", hint=f"{name} has: {', '.join(options_of_policy)}")
        if switch not in options_of_policy:
            others = [other for other, kind in POLICIES.items() if switch in kind.options()]
            hint = f"{name} has: {', '.join(options_of_policy)}"
            raise PolicyError(
                f"policy '{name}' has no option '{switch}'{near(switch, options_of_policy)}",
                hint=hint + (f"; {switch} goes with: {', '.join(others)}" if others else ""),
            )
    repairs = tuple(repair for repair in REPAIRS.values() if repair.name in options)
    return POLICIES[name](repairs=repairs, **dict.fromkeys((o for o in options if o not in REPAIRS), True))


def default_for(schedule: Schedule, momentum: bool = False) -> str:
    """The policy that is used when none is asked for; benchmarks/accuracy measures what each loses.

    `latest` if weights are never stale. Else `spectrain`, with error feedback if no forward misses more than one
    update: there the study found it better. Error feedback costs two copies of the weights for one update missed, and
    one more for each further update.

    Args:
        momentum: every group of the optimizer is known to have momentum; without momentum error feedback harms.
    """
    if schedule.synchronous:
        return Latest.name
    feedback = momentum and most_missed(schedule) <= 1
    return f"{SpecTrain.name}+ef" if feedback else SpecTrain.name


def policy_option(default: str, **more: Any) -> Any:
    """The field of a class of options; `default` is the default in words, `more` as for `option`."""
    return option(None, "--policy", kind=_policy, metavar="NAME[+OPTION]", help=policy_help(default), **more)


def policy_help(default: str) -> str:
    """Its text in `--help`."""
    return f"Which version of the weights forwards and backwards use: latest, stash, spectrain, … [default: {default}]"


def check_policy(policy: str | Policy | None, schedule: Schedule) -> None:
    """Refuse a wrong policy early. Accepts a name that only a model file may know.

    Raises:
        PolicyError: an unknown option, or a combination that makes no sense.
    """
    if isinstance(policy, str) and policy.split("+")[0] in POLICIES:
        make(policy).check(schedule)


def _policy(text: str) -> str:
    """A policy's name with its options: `pipeoptim+keep`. A name that only the model file knows is accepted."""
    if text.split("+")[0] in POLICIES:
        make(text)
    return text


__all__ = ["POLICIES", "Policy", "PredictingPolicy", "copies", "default_for", "make", "register", "sees"]
