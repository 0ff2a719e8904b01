"""The scripts by which nodes read and change the registry in Redis or Valkey, and what they take and give.

All keys begin with `{fb:<cluster>}`:

    q            the last sequence number                 f            stamps up to this number may be gone
    l            stores that may have something pending
    e:<bucket>   key → "stamp claim tokens store"         k:<bucket>   the same keys, in S3's order
    t            "bucket NUL key" → its stamp             s:<store>    "bucket NUL key" of what the store has pending
    n            node → what it says of itself            v            the version of the members
    p            node → the version in which that came    o            living node → the version that it keeps to
    a            living node → ms of its last beat        d            other node → ms at which its lease ran out
    w            nodes that acknowledge writes            h            living node → its horizon
    i            any bytes, for as long as nobody empties the server
    r, b         the run, and ms of its first beat        g, c         nodes that have signed the run; all have

A stamp or claim is a sequence number, 0: none. The tokens name the writes that have claimed the key and are not over,
and behind a `#` each has the number of its claim: only its own end settles it, and no process that has not seen it. The
claim is the number of the first since the key had none.

A script begins with `#!lua`: servers that are no primary, full, or without their replicas then refuse it, although it
may only read. The last word of each call is the mark (`i`) that the asker knows. If it is another one by now, somebody
has emptied the server: the script then gives an error and changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

Word = bytes | str | int

BEAT_SECONDS: Final = 1.0

LEASE_SECONDS: Final = 5.0
"""Seconds without a beat after which a node's horizon holds no stamp any more."""

FIRST_SECONDS = 5.0
"""Seconds from the first beat of a run until it can be complete: all nodes can tell meanwhile whom they know."""

AWAY_SECONDS: Final = 600.0
"""Seconds without a beat after which a node that never acknowledges is no member any more."""

SWEPT_MAX: Final = 500
"""Stamps that one beat removes: 2 ms of Redis' time."""

ROWS_MAX: Final = 1000
"""Entries in one answer."""


_BEGINNING = """#!lua
local fb = KEYS[1]
if redis.call('GET', fb .. 'i') ~= table.remove(ARGV) then
  return redis.error_reply('EMPTIED somebody has emptied the server')
end
"""


class Script:
    """A script, which the server knows by the hash of its text."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = _BEGINNING + text.lstrip()
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


_ENTRIES = """
local function read(bucket, key)
  local value = redis.call('HGET', fb .. 'e:' .. bucket, key)
  if not value then return '0', '0', '-', '' end
  return string.match(value, '^(%d+) (%d+) (%S+) (.*)$')
end
local function write(bucket, key, stamp, claim, tokens, store)
  local value = stamp .. ' ' .. claim .. ' ' .. tokens .. ' ' .. store
  redis.call('HSET', fb .. 'e:' .. bucket, key, value)
  redis.call('ZADD', fb .. 'k:' .. bucket, 0, key)
  return value
end
local function put_stamp(bucket, key, sequence, claim, tokens, store)
  redis.call('ZADD', fb .. 't', sequence, bucket .. '\\0' .. key)
  return write(bucket, key, sequence, claim, tokens, store)
end
local function unclaim(owner, bucket, key)
  redis.call('ZREM', fb .. 's:' .. owner, bucket .. '\\0' .. key)
  put_stamp(bucket, key, redis.call('INCR', fb .. 'q'), '0', '-', '')
end
local function number(name) return tonumber(redis.call('GET', fb .. name) or 0) end
local function parts(name) return string.match(name, '^([^%z]*)%z(.*)$') end
"""

ASK = Script(
    "ask",
    """local own, answers, at = ARGV[1], {}, 2
"""
    + _ENTRIES
    + """
local function without(tokens, token)  -- the claims of other writes; whether there are more
  local others, is_found = {}, false
  for one in string.gmatch(tokens, '[^,]+') do
    if one == token or string.match(one, '^(.*)#') == token then
      is_found = true
    elseif one ~= '-' then
      others[#others + 1] = one
    end
  end
  return others, is_found
end
local function claim(bucket, key, token, sequence)
  local stamp, before, tokens = read(bucket, key)
  local claims = without(tokens, token)
  if #claims == 64 then table.remove(claims, 1) end
  claims[#claims + 1] = token .. '#' .. sequence
  redis.call('SADD', fb .. 'l', own)
  redis.call('ZADD', fb .. 's:' .. own, 0, bucket .. '\\0' .. key)
  return write(bucket, key, stamp, before ~= '0' and before or sequence, table.concat(claims, ','), own)
end
local verbs = {}
function verbs.look(bucket, first, last)
  return redis.call('HMGET', fb .. 'e:' .. bucket, unpack(ARGV, first, last))
end
function verbs.stamp(bucket, first, last)
  local sequence, found = redis.call('INCR', fb .. 'q'), {}
  for i = first, last do
    local _, claimed, tokens, store = read(bucket, ARGV[i])
    found[#found + 1] = put_stamp(bucket, ARGV[i], sequence, claimed, tokens, store)
  end
  return found
end
function verbs.claim(bucket, first, last)  -- all or nothing
  local found, is_free = {}, true
  for i = first, last, 2 do
    local _, _, _, store = read(bucket, ARGV[i])
    is_free = is_free and (store == '' or store == own)
  end
  local sequence = is_free and redis.call('INCR', fb .. 'q')
  for i = first, last, 2 do
    local free = sequence and claim(bucket, ARGV[i], ARGV[i + 1], sequence)
    found[#found + 1] = free or redis.call('HGET', fb .. 'e:' .. bucket, ARGV[i])
  end
  return found
end
function verbs.put(bucket, first, last)  -- claims keys, except those that other stores have claimed later
  redis.call('SADD', fb .. 'l', own)
  for i = first, last, 3 do
    local stamp, _, tokens, store = read(bucket, ARGV[i])
    local _, is_claimed = without(tokens, ARGV[i + 1])
    if store ~= '' and store ~= own and tonumber(string.match(tokens, '%d+$')) < tonumber(ARGV[i + 2]) then
      -- It was over when this store claimed the key. A failover has lost its end, and that claim.
      redis.call('ZREM', fb .. 's:' .. store, bucket .. '\\0' .. ARGV[i])
      write(bucket, ARGV[i], stamp, '0', '-', '')
      store = ''
    end
    if store == '' or (store == own and not is_claimed) then
      claim(bucket, ARGV[i], ARGV[i + 1], redis.call('INCR', fb .. 'q'))
    end
  end
  return 0
end
function verbs.settle(bucket, first, last)
  for i = first, last, 2 do
    local stamp, claimed, tokens, store = read(bucket, ARGV[i])
    local left, is_claimed = without(tokens, ARGV[i + 1])
    if store == own and is_claimed and #left > 0 then
      write(bucket, ARGV[i], stamp, claimed, table.concat(left, ','), own)
    elseif store == own and is_claimed then
      unclaim(own, bucket, ARGV[i])
    end
  end
  return 0
end
function verbs.rows(bucket, first)  -- from, to before, at most
  local keys = redis.call(
    'ZRANGE', fb .. 'k:' .. bucket, ARGV[first], ARGV[first + 1], 'BYLEX', 'LIMIT', 0, ARGV[first + 2])
  if #keys == 0 then return {keys, keys} end
  return {keys, redis.call('HMGET', fb .. 'e:' .. bucket, unpack(keys))}
end
function verbs.own(_, first)  -- behind, at most
  local found = redis.call('ZRANGE', fb .. 's:' .. own, ARGV[first], '+', 'BYLEX', 'LIMIT', 0, ARGV[first + 1])
  for i, name in ipairs(found) do
    local bucket, key = parts(name)
    found[i] = {bucket, key, ({read(bucket, key)})[3]}
  end
  return found
end
function verbs.holders(_, first)  -- from, to before
  local found = {}
  for _, store in ipairs(redis.call('SMEMBERS', fb .. 'l')) do
    local name = fb .. 's:' .. store
    if redis.call('EXISTS', name) == 0 then
      redis.call('SREM', fb .. 'l', store)
    elseif store ~= own and redis.call('ZLEXCOUNT', name, ARGV[first], ARGV[first + 1]) > 0 then
      found[#found + 1] = store
    end
  end
  table.sort(found)
  return found
end
function verbs.above(_, first)  -- later numbers are higher than this one
  if tonumber(ARGV[first]) > number('q') then redis.call('SET', fb .. 'q', ARGV[first]) end
  return 0
end
while at <= #ARGV do
  local verb, bucket, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  answers[#answers + 1] = verbs[verb](bucket, at + 3, at + 2 + count)
  at = at + 3 + count
end
return {number('f'), answers}
""",
)
"""Takes the asking store, and questions: verb, bucket, count of words, words. Gives the floor and the answers."""

BEAT = Script(
    "beat",
    """local node, info, acknowledges, run, signs, seen, horizon, has = unpack(ARGV, 1, 8)
local lease, first, away = ARGV[9], ARGV[10], ARGV[11]
"""
    + _ENTRIES
    + """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function count_up() return redis.call('INCR', fb .. 'v') end
if redis.call('GET', fb .. 'r') ~= run then
  redis.call('DEL', fb .. 'g', fb .. 'c', fb .. 'h', fb .. 'o')
  redis.call('MSET', fb .. 'r', run, fb .. 'b', now)
end
if number('b') > now then redis.call('SET', fb .. 'b', now) end  -- the clock was set back
for _, name in ipairs({'a', 'd'}) do
  for _, other in ipairs(redis.call('ZRANGE', fb .. name, '(' .. now, '+inf', 'BYSCORE')) do
    redis.call('ZADD', fb .. name, now, other)
  end
end
for i = 12, #ARGV, 2 do  -- members that acknowledge, as the node knew them under another run
  if redis.call('HSETNX', fb .. 'n', ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('SADD', fb .. 'w', ARGV[i])
    redis.call('ZADD', fb .. 'd', now, ARGV[i])
    count_up()
  end
end
if redis.call('ZADD', fb .. 'a', now, node) + redis.call('ZREM', fb .. 'd', node) > 0 then count_up() end
if redis.call('HGET', fb .. 'n', node) ~= info then
  redis.call('HSET', fb .. 'n', node, info)
  redis.call('HSET', fb .. 'p', node, count_up())
end
redis.call(acknowledges == '1' and 'SADD' or 'SREM', fb .. 'w', node)
for _, other in ipairs(redis.call('ZRANGE', fb .. 'a', '-inf', now - lease, 'BYSCORE')) do
  for _, name in ipairs({'a', 'h', 'o'}) do redis.call('ZREM', fb .. name, other) end
  redis.call('ZADD', fb .. 'd', now, other)
  count_up()
end
for _, other in ipairs(redis.call('ZRANGE', fb .. 'd', '-inf', now - away, 'BYSCORE')) do
  if redis.call('SISMEMBER', fb .. 'w', other) == 0 then
    for _, name in ipairs({'n', 'p'}) do redis.call('HDEL', fb .. name, other) end
    redis.call('ZREM', fb .. 'd', other)
    count_up()
  end
end
if signs == '1' then redis.call('SADD', fb .. 'g', node) end
local missing = {}
if redis.call('EXISTS', fb .. 'c') == 0 then
  missing = redis.call('SDIFF', fb .. 'w', fb .. 'g')
  if #missing == 0 and signs == '1' and number('b') <= now - first then
    redis.call('SET', fb .. 'c', 1)
  end
end
redis.call('ZADD', fb .. 'o', seen, node)
redis.call('ZADD', fb .. 'h', horizon, node)
local floor = redis.call('ZRANGE', fb .. 'h', 0, 0, 'WITHSCORES')[2]
if tonumber(floor) > number('f') then redis.call('SET', fb .. 'f', floor) end
floor = number('f')
local swept = redis.call('ZRANGE', fb .. 't', '-inf', floor, 'BYSCORE', 'LIMIT', 0, 500)
for _, name in ipairs(swept) do
  local bucket, key = parts(name)
  local _, claim, tokens, store = read(bucket, key)
  redis.call('ZREM', fb .. 't', name)
  if store ~= '' then
    write(bucket, key, '0', claim, tokens, store)
  else
    redis.call('HDEL', fb .. 'e:' .. bucket, key)
    redis.call('ZREM', fb .. 'k:' .. bucket, key)
  end
end
local members = has ~= '' and number('v') ~= tonumber(has) and redis.call('HGETALL', fb .. 'n')
local least = redis.call('ZRANGE', fb .. 'o', 0, 0, 'WITHSCORES')[2]
local is_known = tonumber(least) >= tonumber(redis.call('HGET', fb .. 'p', node) or 0)
return {
  number('q'), floor, #swept, number('v'), is_known and 1 or 0, redis.call('SISMEMBER', fb .. 'g', node),
  redis.call('EXISTS', fb .. 'c'), #missing, {unpack(missing, 1, 10)}, members}
""",
)
"""Takes a node's word on itself; tells it what the registry knows (`Beaten`)."""

FORGET = Script(
    "forget",
    """local node, own, only_asks = ARGV[1], ARGV[2], ARGV[3] == '1'
"""
    + _ENTRIES
    + """
if redis.call('ZSCORE', fb .. 'a', node) then return -1 end
if only_asks then return redis.call('ZCARD', fb .. 's:' .. own) end
for _, name in ipairs(redis.call('ZRANGE', fb .. 's:' .. own, 0, 499)) do
  unclaim(own, parts(name))
end
local left = redis.call('ZCARD', fb .. 's:' .. own)
if left == 0 then
  for _, name in ipairs({'n', 'p'}) do redis.call('HDEL', fb .. name, node) end
  for _, name in ipairs({'w', 'g'}) do redis.call('SREM', fb .. name, node) end
  redis.call('ZREM', fb .. 'd', node)
  redis.call('INCR', fb .. 'v')
end
return left
""",
)
"""Takes a node that does not beat, and its store; gives up some of its pending keys, or 1: only counts them; at last
the node. Gives how many are left; -1: the node beats."""

SCRIPTS: Final = (ASK, BEAT, FORGET)


def prefix_of(cluster: str) -> str:
    return f"{{fb:{cluster}}}"


def key_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def question(verb: str, bucket: str, words: Sequence[Word]) -> list[Word]:
    return [verb, bucket, len(words), *words]


def rows_question(bucket: str, start: bytes, stop: bytes | None) -> list[Word]:
    """Ask for the entries from `start` on and before `stop`; None: to the end. ROWS_MAX at most."""
    return question("rows", bucket, [b"[" + start, b"+" if stop is None else b"(" + stop, ROWS_MAX])


def holders_question(bucket: str, start: bytes, stop: bytes) -> list[Word]:
    """Ask which other stores have something pending in [start, stop) of a bucket."""
    return question("holders", "", [b"[%s\0%s" % (bucket.encode(), start), b"(%s\0%s" % (bucket.encode(), stop)])


def own_question(behind: tuple[bytes, bytes] | None) -> list[Word]:
    """Ask for the asking store's own entries behind a bucket and key; None: from the first on. ROWS_MAX at most."""
    return question("own", "", ["-" if behind is None else b"(" + b"\0".join(behind), ROWS_MAX])


class Entry(NamedTuple):
    """The registry's entry under a key."""

    stamp: int = 0
    claim: int = 0
    tokens: bytes = b"-"
    store: bytes = b""

    @classmethod
    def read(cls, value: bytes | None) -> Entry:
        if value is None:
            return _NOTHING
        stamp, claim, tokens, store = value.split(b" ", 3)
        return cls(int(stamp), int(claim), tokens, store)


_NOTHING: Final = Entry()


class Beat(NamedTuple):
    """A node's word on itself. `info` is what others see; `others` are known members that acknowledge, with theirs.

    `seen`: the version of the members that all its processes keep to. `has`: the version that it has already; None: it
    wants none now.
    """

    node: str
    info: bytes
    acknowledges: bool
    run: str
    signs: bool
    seen: int
    horizon: int
    has: int | None
    others: Sequence[tuple[str, bytes]] = ()

    def words(self) -> list[Word]:
        has = "" if self.has is None else self.has
        flags = (int(self.acknowledges), self.run, int(self.signs), self.seen, self.horizon, has)
        milliseconds = (int(1000 * one) for one in (LEASE_SECONDS, FIRST_SECONDS, AWAY_SECONDS))
        return [self.node, self.info, *flags, *milliseconds, *(word for pair in self.others for word in pair)]


class Beaten(NamedTuple):
    """The registry's answer. `is_known`: all living nodes keep to this one's word.

    `missing` are some of the nodes that have not signed the run. `members` are names, each with its word.
    """

    sequence: int
    floor: int
    swept: int
    version: int
    is_known: int
    is_signed: int
    is_complete: int
    missing_count: int
    missing: list[bytes]
    members: list[bytes] | None
