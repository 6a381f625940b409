"""A new kind of policy touches its file, its call in the kernel, and its test: no table elsewhere lists the kinds."""

from __future__ import annotations

from tests.programs import printed_by

ADDED = '''

class PauseView(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a pausing policy."""

    waiting: int
    state: Any = None


class PausingPolicy(Policy, frozen=True, kw_only=True):
    """Decides how many requests pause."""

    @decides(
        "pausing",
        PolicyKey("generate.pausing", "vsched.policy.router:Some", "Choice of the paused requests."),
        check=check_index,
        default=lambda count: 0,
    )
    def pause(self, view: PauseView) -> int:
        """Return the number of requests that pause."""
        raise NotImplementedError


class Some(PausingPolicy, frozen=True, kw_only=True):
    """Pauses a limited number."""

    limit: int = 3

    def pause(self, view: PauseView) -> int:
        return min(view.waiting, self.limit)

'''
USED = """
from vsched.config import keys_table, load_config
from vsched.errors import ConfigProblems, VschedError
from vsched.policy import router
from vsched.policy_host.seats import PolicySeats

loaded = load_config(None, sets=["generate.pausing.limit=2"], environ={})
assert loaded.policies.by_table["generate.pausing"] == router.Some(limit=2)
assert "| `generate.pausing` |" in keys_table(), keys_table()
try:
    load_config(None, sets=["generate.pausing.limits=2"], environ={})
except VschedError as error:
    assert str(error).startswith("generate.pausing"), error
else:
    raise AssertionError("an unknown field was accepted")
seats = PolicySeats(loaded.policies.for_kernel())
seat = seats.add_seat("generate-0.pausing")  # as the kernel does
assert seat.decide(router.PauseView(waiting=9), 10) == 2
assert seat.decide(router.PauseView(waiting=9), 1) == 0, "2 of 1 is invalid, so the default decides"
assert seats.failed() == {"generate-0.pausing": 1}
"""
RUN = f"""
import sys
from importlib.machinery import PathFinder, SourceFileLoader

class Adding(SourceFileLoader):
    def get_code(self, name):
        return compile(self.get_data(self.path).decode() + {ADDED!r}, self.path, "exec")

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "vsched.policy.router":
            spec = PathFinder.find_spec(name, path)
            spec.loader = Adding(name, spec.origin)
            return spec

sys.meta_path.insert(0, Finder)
{USED}
"""


def test_new_kind_of_policy_is_declared_in_one_file() -> None:
    printed_by(RUN)
