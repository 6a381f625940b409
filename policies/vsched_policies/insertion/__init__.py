"""Insertion policies: the blocks of a finished request that the prefix cache keeps."""

from vsched_policies.insertion.everything import Everything
from vsched_policies.insertion.matching import Matching
from vsched_policies.insertion.prompts import Prompts

__all__ = ["Everything", "Matching", "Prompts"]
