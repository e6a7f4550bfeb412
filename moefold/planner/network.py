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
    most = max(1, _domain_size(cluster) // stride)
    return GroupReach(size, gcd(size, most) if size <= most else most)


def even_domains(cluster: Cluster, size: int, stride: int) -> int:
    """Return the smallest number of domains among which a group can be divided evenly."""
    return size // gcd(size, max(1, _domain_size(cluster) // stride))


def listed_reach(cluster: Cluster, ranks: Sequence[int]) -> GroupReach:
    """Return the distribution of a group of unequally spaced ranks, by the first rank's domain."""
    domain = _domain_size(cluster)
    return GroupReach(len(ranks), sum(rank // domain == ranks[0] // domain for rank in ranks))


def _domain_size(cluster: Cluster) -> int:
    """Return the ranks per domain: all if the cluster fills whole domains or less than one, else
    the largest power of two.
    """
    domain, devices = cluster.domain, cluster.devices
    if devices <= domain or devices % domain == 0:
        return min(domain, devices)
    return 1 << (domain.bit_length() - 1)


def ring_seconds(moved: float, group: GroupReach, cluster: Cluster, rates: Rates) -> float:
    """Return the seconds of an all-gather or reduce-scatter of ``moved`` bytes in total.

    Within a domain each rank forwards ``(n - 1) / n`` of them. Across domains every rank transfers
    its share of the others' bytes over its own NIC, while the links carry the rest.
    """
    if group.size == 1 or not moved:
        return 0.0
    device = cluster.device
    links = (
        moved
        * (group.ranks_per_domain - 1)
        / group.ranks_per_domain
        / (device.link_bandwidth * RING_EFFICIENCY)
    )
    if group.domains == 1:
        return links + LINK_LATENCY
    share = moved * (group.domains - 1) / group.domains / group.ranks_per_domain
    return max(links, share / (device.nic_bandwidth * rates.nic)) + NIC_LATENCY


def expected_distinct(count: int, chosen: float) -> float:
    """Return the expected number of distinct places among ``chosen`` independent choices."""
    return count * (1.0 - (1.0 - 1.0 / count) ** chosen)


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
        per, missed = self.groups // count, 1.0
        for i in range(self.groups_kept):
            missed *= max(0.0, (self.groups - per - i) / (self.groups - i))
        hit = expected_distinct(self.groups_kept, self.top_k) / self.groups_kept
        return count * (1.0 - missed) * hit


DEDUPLICATING = ("alltoall_once", "two_level", "deep_ep", "hybrid_ep", "nccl_ep")


def exchange_seconds(
    rows: DispatchRows,
    dispatcher: str,
    group: GroupReach,
    cluster: Cluster,
    rates: Rates,
    load: float,
) -> float:
    """Return the seconds of one dispatch or one combine.

    Args:
        load: rows of the fullest rank over the mean; the other ranks wait for it.
    """
    if group.size == 1:
        return 0.0
    device, n = cluster.device, group.size
    if dispatcher == "allgather":
        return ring_seconds(rows.rows * rows.bytes * n, group, cluster, rates)
    if dispatcher == "spread":
        return 2 * exchange_seconds(rows, "alltoall", group, cluster, rates, load)
    fused = dispatcher in DEDUPLICATING
    share = rates.link_fused if fused else rates.link
    if dispatcher == "deep_ep":
        share = rates.link_deepep
    volume = rows.rows * rows.bytes * load
    spread = expected_distinct(n, rows.top_k) if fused else rows.top_k
    inside = 1.0 if fused else group.ranks_per_domain / n
    seconds = volume * spread * (n - 1) / n * inside / (device.link_bandwidth * share)
    if group.domains > 1:
        d = group.domains
        away = rows.expected_domains(d) if fused and dispatcher != "alltoall_once" else spread
        far = volume * away * (d - 1) / d / (device.nic_bandwidth * rates.nic)
        return max(seconds, far) + NIC_LATENCY
    return seconds + LINK_LATENCY
