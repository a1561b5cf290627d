"""The account finds out each kind of broken promise, and accepts whatever is allowed."""

import pytest
from account import Account, Broken, by_value, failed, named, returned, settle

from conftest import NOW
from loglib import LogError, OffsetRange, Record, Topic


class Told(LogError):
    """An error that names records of partition 0."""

    def __init__(self, *, lost: range = range(0), in_doubt: range = range(0)) -> None:
        super().__init__("told")
        self.lost = (OffsetRange(0, lost),)
        self.in_doubt = (OffsetRange(0, in_doubt),)


def account_of(values: list[bytes], *, promised: int = 0) -> Account:
    account = Account()
    account.returned(range(len(values)), values)
    account.promise(promised)
    return account


def record(offset: int, value: bytes, timestamp: int = NOW) -> Record:
    return Record(0, offset, timestamp, None, value, (), offset + 1)


A, B, C = b"a", b"b", b"c"


@pytest.mark.parametrize("found", [[A], [A, B], [A, B, C]])
def test_what_is_promised_and_more_of_what_was_appended_is_right(found: list[bytes]) -> None:
    account_of([A, B, C], promised=1).judge(found)


@pytest.mark.parametrize("found", [[B, A], [A, C], [A, B, C, b"d"], [A, A], [b"x"], [B, C], [A, B, B"C"]], ids=str)
def test_anything_but_the_first_records_in_order_is_a_phantom(found: list[bytes]) -> None:
    with pytest.raises(Broken, match="phantoms"):
        account_of([A, B, C]).judge(found)


def test_less_than_was_promised_is_lost() -> None:
    with pytest.raises(Broken, match="lost"):
        account_of([A, B, C], promised=2).judge([A])


def test_promise_holds_from_its_instant_on_and_for_its_kind_of_death() -> None:
    account = account_of([A, B])
    account.promise(1, at=5)
    account.promise(2, at=7, power=False)
    account.judge([], at=4, power=True)
    account.judge([A], at=9, power=True)
    account.judge([A], at=6)
    for at, power, found in ((5, True, []), (5, False, []), (7, False, [A])):
        with pytest.raises(Broken, match="lost"):
            account.judge(found, at=at, power=power)


def test_owed_record_must_be_there_or_be_named() -> None:
    with pytest.raises(Broken, match="untold"):
        account_of([A, B]).settle([A])
    for error in (Told(lost=range(1, 2)), Told(in_doubt=range(1, 2))):
        account = account_of([A, B])
        named([account], error)
        account.settle([A])
        assert account.accounted == 2
    account = account_of([A, B])
    account.died()
    account.settle([A])


def test_record_that_is_called_lost_must_not_be_there() -> None:
    account = account_of([A, B, C])
    named([account], Told(lost=range(1, 2)))
    account.judge([A, C])
    with pytest.raises(Broken, match="phantoms"):
        account.judge([A, B, C])
    with pytest.raises(Broken, match="untold: offset 1 was named twice"):
        named([account], Told(lost=range(1, 2)))


def test_offset_of_a_lost_record_is_given_out_again_and_no_other_one() -> None:
    account = account_of([A, B])
    named([account], Told(lost=range(1, 2)))
    account.returned([1], [C])
    account.judge([A, C])
    with pytest.raises(Broken, match="untold: offset 1 was given out twice"):
        account.returned([1], [B])


def test_record_in_doubt_may_be_left_out_and_no_other_one() -> None:
    account = account_of([A, B, C], promised=3)
    account.called_in_doubt([1], Told())
    account.judge([A, B, C])
    account.judge([A, C])
    for found, kind in (([B, C], "lost"), ([A, B], "lost"), ([A], "lost"), ([A, B, C, C], "phantoms")):
        with pytest.raises(Broken, match=kind):
            account.judge(found)


def test_append_that_fails_half_way_is_owed_what_is_in() -> None:
    account = Account(known_by=by_value)
    account.begin([A, B])
    error = Told()
    error.appended, error.not_appended = (OffsetRange(0, range(1)),), (1,)
    failed([account], error, [A, B])
    account.judge([record(0, A), record(7, B)])  # it may have been written all the same
    with pytest.raises(Broken, match="untold"):
        account.settle([])


def test_record_that_was_given_up_must_not_come_back() -> None:
    account = account_of([A, B])
    account.died()
    account.settle([A])
    with pytest.raises(Broken, match="phantoms"):
        account.judge([A, B])


def test_record_stays_as_it_was_read_and_where_it_was_appended() -> None:
    account = Account(known_by=by_value)
    returned([account], [OffsetRange(0, range(2))], [A, B])
    with pytest.raises(Broken, match="phantoms"):
        account.judge([record(0, A), record(9, B)])
    account.see([record(0, A)])
    account.judge([record(0, A), record(1, B)])
    with pytest.raises(Broken, match="lost|phantoms"):
        account.judge([record(0, A, NOW + 1)])
    with pytest.raises(Broken, match="lost"):
        account.judge([])


def test_lives_follow_each_other_in_the_log() -> None:
    account = Account()
    account.begin([b"a 1", b"b 1", b"c 1"], life=1)
    account.promise(1)
    account.begin([b"b 2", b"c 2"], serial=1, life=2)
    for found in ([b"a 1"], [b"a 1", b"b 1", b"c 1"], [b"a 1", b"b 1", b"c 2"], [b"a 1", b"b 2", b"c 2"]):
        account.judge(found)
    for found in ([b"a 1", b"b 2", b"c 1"], [b"a 1", b"b 3"]):
        with pytest.raises(Broken, match="phantoms"):
            account.judge(found)
    with pytest.raises(Broken, match="lost"):  # what stands in the place of a promised record has displaced it
        account.judge([b"a 2", b"b 2"])


def test_life_that_found_less_than_was_promised_has_lost_it() -> None:
    account = account_of([A, B, C], promised=2)
    account.recovered(2)
    with pytest.raises(Broken, match="phantoms"):
        account.judge([A, B, C])
    with pytest.raises(Broken, match="lost"):
        account.recovered(1)


def test_retention_may_have_dropped_what_it_began_to_drop_and_has_what_it_ended() -> None:
    account = account_of([A, B, C], promised=3)
    account.drop(2, done=False)
    account.judge([A, B, C])
    account.judge([C])
    with pytest.raises(Broken, match="lost|phantoms"):
        account.judge([])
    account.drop(1)
    account.judge([B, C])
    with pytest.raises(Broken):
        account.judge([A, B, C])


def test_log_start_is_one_that_was_published_and_never_moves_back() -> None:
    account = account_of([A, B, C])
    account.log_starts.append((3, 1))
    account.judge([B], at=3, log_start=1)
    for at, log_start, found in ((2, 1, [B]), (3, 2, [C]), (3, 1, [A])):
        with pytest.raises(Broken, match="phantoms"):
            account.judge(found, at=at, log_start=log_start)
    account.drops.append((4, 1))
    account.judge([], at=3, log_start=0)
    with pytest.raises(Broken, match="is back before 1"):
        account.judge([], at=4, log_start=0)


def test_topic_is_settled_with_what_can_be_read(topic: Topic) -> None:
    accounts = [Account(known_by=by_value)]
    offsets = [each.offset for each in topic.read()]
    accounts[0].returned(offsets, [b"%d" % number for number in range(10)])
    settle(accounts, topic)
    accounts[0].returned([topic.append(b"more").offset], [b"more"])
    with pytest.raises(Broken, match="untold"):
        settle(accounts, topic)
    topic.flush()


def test_last_record_is_one_begun_and_no_older_than_what_is_promised() -> None:
    account = Account([A])
    account.promise()
    account.begin([B], at=3)
    account.promise(at=5, power=False)
    assert account.possible(2) == [A]
    assert account.possible(4) == [A, B] == account.possible(9, power=True)
    assert account.possible(5) == [B]
