"""Write an admission policy, and compare it with the default on a virtual clock."""

from vsched.config import Config, GenerateConfig
from vsched.policy import Admission, AdmissionView, RequestPolicy
from vsched.sim import generate_workload, load_cost_model, simulate


class ShortFirst(RequestPolicy, frozen=True, kw_only=True):
    """Admit short prompts first."""

    def admit(self, view: AdmissionView) -> Admission:
        order = sorted(range(len(view.waiting)), key=lambda index: view.waiting[index].tokens or 0)
        return Admission(order[: view.entries_free])


config = Config(generate=GenerateConfig(slots=16))
workload = generate_workload("gamma", seed=0, requests=300, rate=7.0)
cost = load_cost_model("h100-7b")
for label, policies in (("fifo", {}), ("short first", {"generate.admission": ShortFirst()})):
    figures = simulate(config, workload, cost=cost, policies=policies).figures
    print(f"{label}: median time to first token {figures.ttft_ms.p50:.0f} ms")
