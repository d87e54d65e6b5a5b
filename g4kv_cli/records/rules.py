"""The registries of rules: a stable code and a sentence for everything that a request or a launch is refused for.

``require`` is the only place that raises. A rule is declared where it is checked, of a request (``rule``) or of any
launch on a device (``launch_rule``); model/rules.py says what the registry of requests promises.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.errors import ContractError

RULES: dict[str, Rule] = {}
LAUNCH_RULES: dict[str, Rule] = {}
"""What a device holds any launch against, of an entry or of kernels from elsewhere. A request of an entry that has
passed its rules breaks none of these."""

_SHOWN_CHARACTERS = 120
_SHOWN_BITS = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: ``code`` is stable, ``sentence`` says what is wrong when it does not hold."""

    code: str
    sentence: str

    def require(self, holds: bool, field: str, got: object, want: object) -> None:
        """Raise ContractError unless ``holds``."""
        if not holds:
            raise ContractError(self.code, field, shown(got), want, self.sentence)


def shown(value: object) -> object:
    """``value`` itself if its text is short, else a text that is: an error stays one readable line.

    An integer of thousands of digits has no text at all in Python, so it is described.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value.bit_length() <= _SHOWN_BITS else f"an integer of {value.bit_length()} bits"
    text = str(value)
    return value if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def rule(code: str, sentence: str) -> Rule:
    """Declare a rule. The sentence follows the name of the field at fault and fits every use of the rule."""
    if code in RULES or code in LAUNCH_RULES:
        raise ValueError(f"rule {code} is declared twice")
    RULES[code] = Rule(code, sentence)
    return RULES[code]


def launch_rule(code: str, sentence: str) -> Rule:
    """Declare a rule of launches, in the registry of their own; codes are unique over both."""
    if code in RULES or code in LAUNCH_RULES:
        raise ValueError(f"rule {code} is declared twice")
    LAUNCH_RULES[code] = Rule(code, sentence)
    return LAUNCH_RULES[code]
