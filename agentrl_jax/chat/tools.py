"""Tools are declared once, as data: rendered to the model, and its calls checked against them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A tool the policy may call.

    name:       what the policy writes
    doc:        one line for the model
    parameters: name -> JSON type ("string" | "integer" | "number" | "boolean"), all required
    """

    name: str
    doc: str
    parameters: Mapping[str, str] = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        """The tool as an OpenAI-style JSON schema, as chat templates of real models expect it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.doc,
                "parameters": {
                    "type": "object",
                    "properties": {k: {"type": v} for k, v in self.parameters.items()},
                    "required": list(self.parameters),
                },
            },
        }
