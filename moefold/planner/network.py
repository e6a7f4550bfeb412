"""Time of collectives on a topology: domains of fast links, connected by one NIC per device.

Ranks of a group are equally spaced; ``stride`` is the distance of neighbours in the order of ranks,
so that a group of ``size`` ranks spans ``size * stride`` ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from moefold.planner.curves import Rates
from moefold.planner.hardware import Cluster

LINK_LATENCY = 8e-6
"""Latency in seconds of a collective within a domain (NCCL's order of magnitude)."""
NIC_LATENCY = 25e-6
"""Latency in seconds of a collective across domains."""
RING_EFFICIENCY = 0.85
"""Share of link bandwidth that large all-gathers and reduce-scatters reach (nccl-tests on H100 and
NVL72: 370-380 of 450 and 700-800 of 900 GB/s)."""


@dataclass(frozen=True)
class GroupReach:
    """Distribution of a group of ranks over domains."""

    size: int
    ranks_per_domain: int
    """Ranks of the group in one domain."""

    @property
    def domains(self) -> int:
        """Number of domains that the group spans."""
        return -(-self.size // self.ranks_per_domain)


def strided_reach(cluster: Cluster, size: int, stride: int) -> GroupReach:
    """Return the distribution of a group over domains. A group that fits into a domain but does not
    divide it may straddle two; it counts as divided into the largest parts that never do.
    """
    fitting = max(1, _domain_size(cluster) // stride)
    return GroupReach(size, gcd(size, fitting) if size <= fitting else fitting)


def even_domains(cluster: Cluster, size: int, stride: int) -> int:
    """Return the smallest number of domains among which a group can be divided evenly."""
    return size // gcd(size, max(1, _domain_size(cluster) // stride))


def listed_reach(cluster: Cluster, ranks: Sequence[int]) -> GroupReach:
    """Return the distribution of a group of unequally spaced ranks, by the first rank's domain."""
    domain = _domain_size(cluster)
    first = ranks[0] // domain
    return GroupReach(len(ranks), sum(rank // domain == first for rank in ranks))


def _domain_size(cluster: Cluster) -> int:
    """Return the ranks per domain: all if the cluster fills whole domains or less than one, else
    the largest power of two.
    """
    domain = cluster.domain
    devices = cluster.devices
    if devices <= domain or devices % domain == 0:
        return min(domain, devices)
    return 1 << (domain.bit_length() - 1)


def ring_seconds(moved: float, group: GroupReach, cluster: Cluster, nic: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter of ``moved`` bytes in total.

    Within a domain each rank forwards ``(n - 1) / n`` of them. Across domains every rank transfers
    its share of the others' bytes over its own NIC, of whose rate it reaches the share ``nic``,
    while the links carry the rest.
    """
    if group.size == 1 or not moved:
        return 0.0
    device = cluster.device
    inside = group.ranks_per_domain
    domains = group.domains
    links = moved * (inside - 1) / inside / (cluster.link_rate(inside) * RING_EFFICIENCY)
    if domains == 1:
        return links + LINK_LATENCY
    across = moved * (domains - 1) / domains / inside / (device.nic_bandwidth * nic)
    return max(links, across) + NIC_LATENCY


def expected_distinct(count: int, draws: float) -> float:
    """Return the expected number of distinct items, of ``count``, in independent ``draws``."""
    return count * (1.0 - (1.0 - 1.0 / count) ** draws)


@dataclass(frozen=True)
class DispatchRows:
    """Rows that are sent to experts: their number, bytes per row, and experts per row."""

    rows: float
    bytes: float
    top_k: int
    groups_kept: int | None = None
    """Groups, of ``groups``, from which a token may choose experts; None without group limits."""
    groups: int = 1

    def expected_domains(self, count: int) -> float:
        """Return the expected number of distinct domains, of ``count``, among a token's experts.

        Group-limited routing reaches only the domains that hold the chosen groups.
        """
        if self.groups_kept is None or count > self.groups:
            return expected_distinct(count, self.top_k)
        per_domain = self.groups // count
        missed = 1.0
        for i in range(self.groups_kept):
            missed *= max(0.0, (self.groups - per_domain - i) / (self.groups - i))
        used = expected_distinct(self.groups_kept, self.top_k) / self.groups_kept
        return count * (1.0 - missed) * used


DEDUPLICATING = ("alltoall_once", "two_level", "deep_ep", "hybrid_ep", "nccl_ep")
"""Dispatchers that send a row once to each rank, whatever the number of its experts there."""


def exchange_seconds(
    rows: DispatchRows,
    dispatcher: str,
    group: GroupReach,
    cluster: Cluster,
    rates: Rates,
    load: float,
    nic: float | None = None,
) -> float:
    """Return the seconds of one dispatch or one combine.

    Args:
        rows: what a rank sends.
        dispatcher: how it sends them.
        group: the ranks that exchange.
        cluster: their links.
        rates: the shares of the links' rates that are reached.
        load: rows of the fullest rank, for which the others wait, over the mean.
        nic: the share of a NIC's rate; default is that of exchanges with experts.
    """
    if group.size == 1:
        return 0.0
    device = cluster.device
    ranks = group.size
    nic = rates.nic_exchange if nic is None else nic
    if dispatcher == "allgather":
        return ring_seconds(rows.rows * rows.bytes * ranks, group, cluster, nic)
    if dispatcher == "spread":
        return 2 * exchange_seconds(rows, "alltoall", group, cluster, rates, load, nic)
    deduplicates = dispatcher in DEDUPLICATING
    efficiency = rates.link_fused if deduplicates else rates.link
    if dispatcher == "deep_ep":
        efficiency = rates.link_deepep
    volume = rows.rows * rows.bytes * load
    copies = expected_distinct(ranks, rows.top_k) if deduplicates else rows.top_k
    inside = 1.0 if deduplicates else group.ranks_per_domain / ranks
    link_rate = cluster.link_rate(group.ranks_per_domain)
    seconds = volume * copies * (ranks - 1) / ranks * inside / (link_rate * efficiency)
    if (domains := group.domains) == 1:
        return seconds + LINK_LATENCY
    if deduplicates and dispatcher != "alltoall_once":
        copies = rows.expected_domains(domains)
    across = volume * copies * (domains - 1) / domains / (device.nic_bandwidth * nic)
    return max(seconds, across) + NIC_LATENCY
