"""Dispatch policies: the encode group of the next batch, and the images it may contain."""

from vsched_policies.dispatch.fewest_held_up import FewestHeldUp
from vsched_policies.dispatch.size_classes import SizeClasses

__all__ = ["FewestHeldUp", "SizeClasses"]
