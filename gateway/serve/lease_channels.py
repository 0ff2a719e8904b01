"""The channels over which workers ask for bandwidth, as they are handed from the supervisor to its children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from socket import socket
from typing import NamedTuple

from gateway.config import Settings
from gateway.metering import lease_channel


class ChannelDescriptors(NamedTuple):
    """One worker's channel: the ends' numbers, the same in every process that inherits them."""

    holder: int
    book: int


LeaseDescriptors = Mapping[str, ChannelDescriptors]
"""By worker's name; empty where no ceiling is set."""


def open_channels(settings: Settings, holders: Sequence[str], undo: ExitStack) -> dict[str, ChannelDescriptors]:
    """A channel for each process, if there is anything to ask for. `undo` closes them."""
    channels = {name: channel for name in holders if (channel := lease_channel(settings)) is not None}
    return {
        name: ChannelDescriptors(*(undo.enter_context(end).fileno() for end in ends)) for name, ends in channels.items()
    }


def holders_end(descriptors: LeaseDescriptors, name: str) -> socket | None:
    """In a process that asks: its own end."""
    return socket(fileno=descriptors[name].holder) if name in descriptors else None


def books_ends(descriptors: LeaseDescriptors) -> dict[str, socket]:
    """In the background process: the other ends, by worker."""
    return {name: socket(fileno=one.book) for name, one in descriptors.items()}
