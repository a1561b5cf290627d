"""Exactly once: orders become bills, each once, though this program may be killed at any moment.

The program reads the topic `orders` as a member of a group. For some orders at a time it appends to two topics, `bills`
and `stock`, and commits the group's offsets, in one transaction. So either all three are done, or nothing is: no bill
without its change of stock, no order billed twice, none forgotten. The orders themselves are also one transaction. It
has version 0 of its app, so a second start does not add them again.

    python examples/exactly_once.py data              # stop it with Ctrl-C or `kill -9`, as often as you like
    python examples/exactly_once.py data              # it goes on, and checks the result at the end
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from time import sleep

import loglib
from loglib import Record, Topic

AMOUNTS = 7  # an order has 1 to 7 pieces
PRICE = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where the topics are, or will be")
    parser.add_argument("--orders", type=int, default=10_000, help="how many orders to make up (default 10,000)")
    parser.add_argument("--at-once", type=int, default=200, help="how many of them in a transaction (default 200)")
    parser.add_argument("--work", type=float, default=0.2, help="milliseconds that an order takes (default 0.2)")
    args = parser.parse_args()
    with (
        Topic.open(args.directory / "orders", create=True, partitions=4) as orders,
        Topic.open(args.directory / "bills", create=True, partitions=2) as bills,
        Topic.open(args.directory / "stock", create=True) as stock,
    ):
        try:
            take_orders(orders, args.orders)
            work(orders, bills, stock, at_once=args.at_once, seconds_each=args.work / 1000)
        except KeyboardInterrupt:
            raise SystemExit("stopped; start it again to go on") from None
        check(orders, bills, stock)


def take_orders(orders: Topic, count: int) -> None:
    """Append the orders, once: a version of an app is committed at most once."""
    with loglib.transaction("shop", version=0) as tx:
        numbers = range(count)
        values = [json.dumps({"order": each, "pieces": each % AMOUNTS + 1}).encode() for each in numbers]
        tx.append_many(orders, values, keys=[b"customer %d" % (each % 100) for each in numbers])
    print("the orders are there already" if tx.repeated else f"{count:,} orders", flush=True)


def work(orders: Topic, bills: Topic, stock: Topic, *, at_once: int, seconds_each: float) -> None:
    """Handle the orders that are not handled yet."""
    done = 0
    with orders.group("billing", commit="manual") as group:
        while records := group.poll(max_records=at_once, timeout=0.5):
            with loglib.transaction("billing") as tx:
                sleep(seconds_each * len(records))  # the real work
                for record in records:
                    order = of(record)
                    bill = {"order": order["order"], "total": order["pieces"] * PRICE}
                    tx.append(bills, json.dumps(bill).encode(), record.key)
                    tx.append(stock, json.dumps({"order": order["order"], "change": -order["pieces"]}).encode())
                tx.commit(group)  # all that `poll` has returned
            done += len(records)
            print(f"transaction {tx.version}: {done:,} orders in this run", flush=True)


def check(orders: Topic, bills: Topic, stock: Topic) -> None:
    """Compare what is in the three topics."""
    pieces = {of(record)["order"]: of(record)["pieces"] for record in orders.read()}
    billed = Counter(of(record)["order"] for record in bills.read())
    changed = Counter(of(record)["order"] for record in stock.read())
    for name, found in (("bills", billed), ("stock", changed)):
        twice = sum(count > 1 for count in found.values())
        print(f"{name}: {len(found):,} of {len(pieces):,} orders, {twice:,} of them more than once")
    right = (
        billed == changed == Counter(pieces.keys())
        and sum(of(record)["total"] for record in bills.read()) == PRICE * sum(pieces.values())
        and sum(of(record)["change"] for record in stock.read()) == -sum(pieces.values())
    )
    if not right:
        raise SystemExit("the topics do not agree")
    print("each order has its effect exactly once")


def of(record: Record) -> dict[str, int]:
    content: dict[str, int] = json.loads(record.value or b"")
    return content


if __name__ == "__main__":
    main()
