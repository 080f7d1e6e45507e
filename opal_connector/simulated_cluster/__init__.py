"""A trace through many simulated instances behind the real router and its index of all of them."""

from opal_connector.simulated_cluster.cluster import ClusterSimulation
from opal_connector.simulated_cluster.report import (
    BalanceReport,
    ClusterReport,
    EventTraffic,
    RouterReport,
)

__all__ = ["BalanceReport", "ClusterReport", "ClusterSimulation", "EventTraffic", "RouterReport"]
