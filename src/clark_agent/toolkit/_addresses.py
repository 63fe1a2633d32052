"""Decides which addresses are on the public internet, from tables in this module.

Python's definition of a global address in ``ipaddress`` differs between releases. These tables
follow the IANA special-purpose registries for IPv4 and IPv6, and are stricter: an address with a
special purpose is not public, even if it is globally reachable.

An IPv6 address that maps to an IPv4 address (IPv4-mapped, or NAT64) is judged as that IPv4 address.
Addresses of obsolete tunnels (6to4, Teredo) are never public, whatever they wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TypeAlias

__all__ = ["Address", "Network", "is_reachable"]

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_SPECIAL_V4 = tuple(
    [
        IPv4Network(network)
        for network in (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared between a provider and its customers (carrier-grade NAT)
            "127.0.0.0/8",  # this machine
            "168.63.129.16/32",  # looks public, but serves a cloud's own virtual machines
            "169.254.0.0/16",  # link-local, and the metadata services of clouds
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # AMT
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        )
    ]
)
_GLOBAL_V6 = IPv6Network("2000::/3")
"""The range allocated as global unicast. No other IPv6 address is public."""
_SPECIAL_V6 = tuple(
    [
        IPv6Network(network)
        for network in (
            "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks and others
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        )
    ]
)
_NAT64 = IPv6Network("64:ff9b::/96")


def is_reachable(address: Address, private: Sequence[Network] = ()) -> bool:
    """Return whether the address is public or in one of the ``private`` networks."""
    inner = _inner(address)
    if any(each in network for network in private for each in (address, inner)):
        return True
    if isinstance(inner, IPv4Address):
        return not any(inner in network for network in _SPECIAL_V4)
    return inner in _GLOBAL_V6 and not any(inner in network for network in _SPECIAL_V6)


def _inner(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address maps to, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address
