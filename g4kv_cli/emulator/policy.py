"""What becomes of a finding: it is raised, reported or ignored, by its kind."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal

from g4kv_cli.device.emulated.faults import FATAL_KINDS, FAULT_KINDS
from g4kv_cli.errors import UsageError

Action = Literal["raise", "report", "ignore"]
PolicyLike = Action | Mapping[str, Action]
ACTIONS: tuple[Action, ...] = ("raise", "report", "ignore")
DEFAULT = "default"


class Policy:
    """One action for all kinds of findings, or by kind with the rest under ``"default"`` (``"raise"`` if not given).

    ``Policy({"default": "report", "shared_race": "raise"})``. A kind that ends the launch cannot be ignored; with
    "ignore" as the default those are raised. Raises UsageError for a kind or an action that there is not.
    """

    def __init__(self, stated: PolicyLike = "raise") -> None:
        actions: Mapping[str, Action] = {DEFAULT: stated} if isinstance(stated, str) else dict(stated)
        for kind, action in actions.items():
            if kind != DEFAULT and kind not in FAULT_KINDS:
                near = difflib.get_close_matches(str(kind), FAULT_KINDS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(FAULT_KINDS))}"
                raise UsageError(f"no finding is of kind {kind!r}; {hint}")
            if action not in ACTIONS:
                raise UsageError(f"policy of {kind!r} is {action!r}; it can be {', '.join(ACTIONS)}")
            if action == "ignore" and kind in FATAL_KINDS:
                raise UsageError(f"a launch ends with {kind!r}, so it cannot be ignored; report it or raise")
        self._default: Action = actions.get(DEFAULT, "raise")
        self._actions = {kind: action for kind, action in actions.items() if kind != DEFAULT}

    @staticmethod
    def of(stated: PolicyLike | Policy) -> Policy:
        """The policy itself, or one made of what was stated."""
        return stated if isinstance(stated, Policy) else Policy(stated)

    def action(self, kind: str) -> Action:
        """What is done about a finding of this kind."""
        if kind in self._actions:
            return self._actions[kind]
        return "raise" if kind in FATAL_KINDS and self._default == "ignore" else self._default
