"""loglib for asyncio: the same topics, readers, groups and shares, for programs that run in an event loop.

from loglib import aio

async with aio.open("data/orders", partitions=4) as topic:
    await topic.append(b"...", key=b"customer-7")
    await topic.flush()
    async for record in topic.follow("begin"):
        print(record.value)
"""

from .group import AsyncGroup
from .job import AsyncJob, AsyncJobBatch
from .reader import AsyncReader
from .share import AsyncShare
from .topic import AsyncTopic, group, open_topic

open = open_topic  # noqa: A001  as in `aio.open(...)`

__all__ = ["AsyncGroup", "AsyncJob", "AsyncJobBatch", "AsyncReader", "AsyncShare", "AsyncTopic", "group", "open"]
