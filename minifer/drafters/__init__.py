"""Drafters: who proposes the tokens that a pass of the target verifies. One interface (drafter.py), a module each.

What each needs of a target whose layers or ranks are apart, for each row and pass (D width of the target in elements):

| drafter | reads of the target | where it runs | its own weights there | travels more than the agreed draft |
|---|---|---|---|---|
| prompt lookup | agreed tokens | where the output is | none | nothing |
| draft model | agreed tokens | where the output is | replicated | nothing |
| Medusa | hidden state of the last kept token, D | last stage of a pipeline, each rank of a tensor group | replicated | nothing |
| EAGLE | states of its layers for all tokens, D each; embedding; rows of its head | where the output is | replicated | the states |
| DeepSeek | states of the last layer for all tokens, D; embedding; head | where the output is | replicated | nothing |
| Gemma | keys and values of two of its layers; hidden state, D; embedding | where those layers are | replicated | nothing |

A draft is 8 bytes for each id and each parent, agreed like every decision.
"""

from .combined import Combined
from .deepseek import DeepSeek
from .draft_model import DraftModel
from .drafter import Drafter
from .eagle import Eagle, EagleDrafter
from .gemma import Gemma, GemmaDrafter
from .loading import KINDS, available, load
from .medusa import Medusa
from .prompt_lookup import PromptLookup
from .recurrent import Recurrent

__all__ = [
    "KINDS",
    "Combined",
    "DeepSeek",
    "DraftModel",
    "Drafter",
    "Eagle",
    "EagleDrafter",
    "Gemma",
    "GemmaDrafter",
    "Medusa",
    "PromptLookup",
    "Recurrent",
    "available",
    "load",
]
