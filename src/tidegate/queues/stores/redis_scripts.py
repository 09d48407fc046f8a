"""What Redis decides, in Lua: each script is one step that happens wholly or not at all, at Redis's own time.

| key | type | holds |
|---|---|---|
| `{q:i}:s` | stream | messages: id `<sequence>-0`, field `r` the sealed record, `g` its group if it has one |
| `{q:i}:c` | hash | `last` sequence given to a message, `cursor` the last one taken, `bytes` |
| `{q:i}:l` | sorted set | leases: sequence by deadline in milliseconds |
| `{q:i}:d` | hash | sequence: how often delivered, size, group; as long as the message is there |
| `{q:i}:a` | sorted set | sequences to be delivered again |
| `{q:i}:b` | sorted set | group and sequence of messages behind others of their group that are leased |
| `{q:i}:g` | hash | group: how many of its messages are leased |
| `{q:i}:i` | sorted set | identities by the microsecond at which they came |
| `{q:i}:m` | hash | mark of a producer: the number of its last batch |
| `{q:i}:u` | sorted set | producers by the microsecond at which their last batch came |
| `{q:i}:w` | stream | one entry, replaced whenever messages can be leased that could not before: blocked reads wake |
| `{q:i}:x` | hash | sequence: what was there in place of a record |

Dead letters of `q` lie in `{q:i}:dead:s` and so on, where field `h` tells of their history. All keys of a script have
one hash tag, so that a cluster of Redis runs them too. Invariant: a sequence is in at most one of l, a and b; what is
in none of them, and above the cursor, was never taken.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

from tidegate.queues.store import PRODUCERS_MAX

KEYS: Final = "sclabdgimuwx"
# Messages that a script removes or moves at most: Redis does nothing else meanwhile.
STEP_MESSAGES_MAX: Final = 1000
# A blocked read ends after so long, and looks after deadlines; nearer ones wake it when they are set.
BLOCK_MS: Final = 5000
BEHIND_MAX: Final = 10_000


class Script:
    """A text in Lua, and the name by which Redis knows it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


def _script(body: str) -> Script:
    """With what the scripts of queues share."""
    return Script(_KEYS_AND_BOUNDS + _SHARED + body)


_KEYS_AND_BOUNDS: Final = f"""
local EXPIRED_MAX, SOON_MS, BEHIND_MAX, PRODUCERS_MAX = 2000, {BLOCK_MS}, {BEHIND_MAX}, {PRODUCERS_MAX}
local function queue(first)
  local q, names = {{}}, '{KEYS}'
  for at = 1, #names do q[string.sub(names, at, at)] = KEYS[first + at - 1] end
  return q
end
"""

_SHARED: Final = r"""
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Lua writes large numbers as 1e+15 unless told otherwise.
local function text(number) return string.format('%.0f', number) end
local function id(sequence) return text(sequence) .. '-0' end
local function sequence_of(entry) return string.match(entry[1], '^%d+') end

local function fields(entry)
  local found = {r = '', g = '', h = ''}
  for at = 1, #entry[2], 2 do found[entry[2][at]] = entry[2][at + 1] end
  return found
end

-- Deliveries are negative while a release is delayed, so that no receipt fits. What an operator has removed is unknown.
local function parse_known(known)
  local deliveries, size, group = string.match(known or '0 0 ', '^(%-?%d+) (%d+) (.*)$')
  return tonumber(deliveries), tonumber(size), group
end

local function as_known(deliveries, size, group) return deliveries .. ' ' .. size .. ' ' .. group end

local function remember(q, sequence, deliveries, size, group)
  redis.call('HSET', q.d, sequence, as_known(deliveries, size, group))
end

local function wake(q) redis.call('XADD', q.w, 'MAXLEN', 1, '*', 'x', '') end

local function waiting(q)
  return math.max(0, redis.call('XLEN', q.s) - redis.call('ZCARD', q.l) - redis.call('ZCARD', q.b))
end

local function earliest(q)
  return tonumber(redis.call('ZRANGE', q.l, 0, 0, 'WITHSCORES')[2])
end

-- Whoever is blocked has reckoned with the deadlines that there were.
local function wake_for_deadline(q, before, deadline, now)
  if deadline - now < SOON_MS and (not before or deadline < before) then wake(q) end
end

-- The length stands first, so that no group is the beginning of another.
local function behind(group) return string.format('%08x', #group) .. group end

local function set_behind(q, sequence, group)
  redis.call('ZADD', q.b, 0, behind(group) .. string.format('%016.0f', sequence))
end

-- One message of a group is no longer leased; after the last of them the others can be. Whether some waited.
local function leave_group(q, group)
  if group == '' or redis.call('HINCRBY', q.g, group, -1) > 0 then return false end
  redis.call('HDEL', q.g, group)
  local first, last = '[' .. behind(group), '(' .. behind(group) .. ':'
  local freed = redis.call('ZRANGEBYLEX', q.b, first, last)
  for _, member in ipairs(freed) do
    local sequence = text(tonumber(string.sub(member, -16)))
    redis.call('ZADD', q.a, sequence, sequence)
  end
  redis.call('ZREMRANGEBYLEX', q.b, first, last)
  return #freed > 0
end

local function put_again(q, sequence, group)
  redis.call('ZREM', q.l, sequence)
  if group == '' then
    redis.call('ZADD', q.a, sequence, sequence)
  else
    set_behind(q, sequence, group)
    leave_group(q, group)
  end
end

-- Ends the leases whose time is over; how many of them somebody held. The first write needs no memory: after it Redis
-- lets a script go on when its memory is full, and consumers are who can empty it.
local function expire(q, now)
  redis.call('ZREM', q.l, '')
  local expired = 0
  for _, sequence in ipairs(redis.call('ZRANGEBYSCORE', q.l, '-inf', now, 'LIMIT', 0, EXPIRED_MAX)) do
    local deliveries, size, group = parse_known(redis.call('HGET', q.d, sequence))
    if deliveries < 0 then remember(q, sequence, -deliveries, size, group) else expired = expired + 1 end
    put_again(q, sequence, group)
  end
  return expired
end

-- A message leaves the queue, whatever state it was in. Whether others of its group can be leased because of it.
local function remove(q, sequence, size, group)
  redis.call('XDEL', q.s, id(sequence))
  redis.call('HDEL', q.d, sequence)
  redis.call('ZREM', q.a, sequence)
  redis.call('HINCRBY', q.c, 'bytes', -size)
  if group ~= '' then redis.call('ZREM', q.b, behind(group) .. string.format('%016.0f', sequence)) end
  return redis.call('ZREM', q.l, sequence) == 1 and leave_group(q, group)
end

local function append(q, sequence, record, group, history)
  if history then
    redis.call('XADD', q.s, id(sequence), 'r', record, 'g', group, 'h', history)
  elseif group ~= '' then
    redis.call('XADD', q.s, id(sequence), 'r', record, 'g', group)
  else
    redis.call('XADD', q.s, id(sequence), 'r', record)
  end
end

local function counter(q, name) return tonumber(redis.call('HGET', q.c, name) or '0') end
"""

# messages_max, bytes_max, deduplication in microseconds, identities_max, make room (1 or 0), producer and number of the
# batch if it has them, then record, group and identity of each. Gives {0, duplicates, dropped, waiting}, or
# {1, messages} or {2, bytes} when it is full.
ENQUEUE: Final = _script(r"""
local q = queue(1)
local messages_max, bytes_max, kept_us = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local producer, number = ARGV[6], tonumber(ARGV[7])
if producer ~= '' and tonumber(redis.call('HGET', q.m, producer) or '0') >= number then
  return {0, (#ARGV - 7) / 3, 0, waiting(q)}
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]

local fresh, seen, size, duplicates = {}, {}, 0, 0
for at = 8, #ARGV, 3 do
  local identity = kept_us > 0 and ARGV[at + 2] or ''
  local came = identity ~= '' and (seen[identity] or tonumber(redis.call('ZSCORE', q.i, identity) or '0')) or 0
  if came > 0 and came >= now_us - kept_us then
    duplicates = duplicates + 1
  else
    fresh[#fresh + 1] = at
    size = size + #ARGV[at]
  end
  seen[identity] = now_us
end
if #fresh == 0 then return {0, duplicates, 0, waiting(q)} end

local messages, bytes = redis.call('XLEN', q.s), counter(q, 'bytes')
local surplus, surplus_bytes = messages + #fresh - messages_max, bytes + size - bytes_max
local dropped, start = {}, '-'
while ARGV[5] == '1' and start and (surplus > 0 or surplus_bytes > 0) do
  local page = redis.call('XRANGE', q.s, start, '+', 'COUNT', 100)
  for _, entry in ipairs(page) do
    if surplus <= 0 and surplus_bytes <= 0 then break end
    if not redis.call('ZSCORE', q.l, sequence_of(entry)) then
      dropped[#dropped + 1] = entry
      surplus, surplus_bytes = surplus - 1, surplus_bytes - #fields(entry).r
    end
  end
  start = page[1] and '(' .. page[#page][1]
end
if surplus > 0 then return {1, messages} end
if surplus_bytes > 0 then return {2, bytes} end

-- The first write: when memory is full it is refused, and nothing has happened.
local last = redis.call('HINCRBY', q.c, 'last', #fresh)
for _, entry in ipairs(dropped) do
  local found = fields(entry)
  remove(q, sequence_of(entry), #found.r, found.g)
end
for index, at in ipairs(fresh) do
  append(q, last - #fresh + index, ARGV[at], ARGV[at + 1])
  if kept_us > 0 and ARGV[at + 2] ~= '' then redis.call('ZADD', q.i, now_us + index, ARGV[at + 2]) end
end
if producer ~= '' then
  redis.call('HSET', q.m, producer, text(number))
  redis.call('ZADD', q.u, now_us, producer)
  for _, forgotten in ipairs(redis.call('ZRANGE', q.u, 0, -1 - PRODUCERS_MAX)) do
    redis.call('HDEL', q.m, forgotten)
    redis.call('ZREM', q.u, forgotten)
  end
end
redis.call('HINCRBY', q.c, 'bytes', size)
redis.call('ZREMRANGEBYSCORE', q.i, '-inf', '(' .. text(now_us - kept_us))
redis.call('ZREMRANGEBYRANK', q.i, 0, -1 - ARGV[4])
wake(q)
return {0, duplicates, #dropped, waiting(q)}
""")

# Deduplication in microseconds, then identities. Gives whether all of them came lately.
HAS: Final = _script(r"""
local q, time = queue(1), redis.call('TIME')
local since_us = time[1] * 1000000 + time[2] - tonumber(ARGV[1])
for at = 2, #ARGV do
  if tonumber(redis.call('ZSCORE', q.i, ARGV[at]) or '0') < since_us then return 0 end
end
return 1
""")

# messages_max, bytes_max, visibility in ms, max_deliveries, leased_max, suspect after; the queue of dead letters behind
# the own one, if there is one. Gives {waiting, expired, redelivered, dead}, then sequence, delivery, record and history
# of each message.
LEASE: Final = _script(r"""
local q = queue(1)
local now = now_ms()
local expired = expire(q, now)
local messages_max = math.min(tonumber(ARGV[1]), tonumber(ARGV[5]) - redis.call('ZCARD', q.l))
local bytes_max, deadline, max_deliveries, suspect_after =
  tonumber(ARGV[2]), now + tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6])
local before, cursor = earliest(q), counter(q, 'cursor')
local reply, leases, known, groups = {0, 0, 0, 0}, {}, {}, {}
local count, size, redelivered, dead = 0, 0, 0, 0

local function bury(sequence, deliveries, found)
  local grave = queue(1 + #KEYS / 2)
  append(grave, redis.call('HINCRBY', grave.c, 'last', 1), found.r, found.g,
         sequence .. ' ' .. deliveries .. ' ' .. text(now))
  redis.call('HINCRBY', grave.c, 'bytes', #found.r)
  remove(q, sequence, #found.r, found.g)
  if dead == 0 then wake(grave) end
  dead = dead + 1
end

local function grant(sequence, delivery, found)
  leases[#leases + 1] = deadline
  leases[#leases + 1] = sequence
  known[#known + 1] = sequence
  known[#known + 1] = as_known(delivery, #found.r, found.g)
  if found.g ~= '' then
    redis.call('HINCRBY', q.g, found.g, 1)
    groups[found.g] = true
  end
  count, size = count + 1, size + #found.r
  if delivery > 1 then redelivered = redelivered + 1 end
  for _, value in ipairs({sequence, delivery, found.r, found.h}) do reply[#reply + 1] = value end
end

-- Whether it was taken out of where it waited, and whether more may be.
local function consider(sequence, deliveries, found, is_again)
  if found.g ~= '' and not groups[found.g] and redis.call('HEXISTS', q.g, found.g) == 1 then
    if not is_again and redis.call('ZCARD', q.b) >= BEHIND_MAX then return false, false end
    set_behind(q, sequence, found.g)
    return true, true
  end
  local delivery = deliveries + 1
  if max_deliveries > 0 and delivery > max_deliveries then
    bury(sequence, deliveries, found)
    return true, true
  end
  local is_alone = delivery > suspect_after or (delivery > 1 and delivery == max_deliveries)
  local is_full = count >= messages_max or (count > 0 and size + #found.r > bytes_max)
  if is_full or (is_alone and count > 0) then return false, false end
  grant(sequence, delivery, found)
  return true, not is_alone
end

local function take_again()
  while true do
    local sequence = redis.call('ZRANGE', q.a, 0, 0)[1]
    if not sequence then return true end
    local entry = redis.call('XRANGE', q.s, id(sequence), id(sequence))[1]
    local is_taken, may_go_on = true, true
    if entry then
      local before = redis.call('HGET', q.d, sequence)
      is_taken, may_go_on = consider(sequence, (parse_known(before)), fields(entry), true)
    else
      redis.call('HDEL', q.d, sequence)
    end
    if is_taken then redis.call('ZREM', q.a, sequence) end
    if not may_go_on then return false end
  end
end

-- Pages about as large as what is wanted: what is not taken was read in vain.
local function page_messages()
  local usual = counter(q, 'bytes') / math.max(1, redis.call('XLEN', q.s))
  local by_bytes = math.floor((bytes_max - size) / math.max(1, usual)) + 1
  return math.max(1, math.min(messages_max - count + 1, by_bytes, 500))
end

local function take_new()
  while true do
    local page = redis.call('XRANGE', q.s, '(' .. id(cursor), '+', 'COUNT', page_messages())
    if #page == 0 then return end
    for _, entry in ipairs(page) do
      local sequence = sequence_of(entry)
      local is_taken, may_go_on = consider(sequence, 0, fields(entry), false)
      if is_taken then cursor = tonumber(sequence) end
      if not may_go_on then return end
    end
  end
end

if take_again() then take_new() end
redis.call('HSET', q.c, 'cursor', text(cursor))
for at = 1, #leases, 1000 do
  local last = math.min(at + 999, #leases)
  redis.call('ZADD', q.l, unpack(leases, at, last))
  redis.call('HSET', q.d, unpack(known, at, last))
end
if count > 0 then wake_for_deadline(q, before, deadline, now) end
reply[1], reply[2], reply[3], reply[4] = waiting(q), expired, redelivered, dead
return reply
""")

# What to do (delete, extend, release or return), for how many ms, then sequence and delivery of each receipt. Gives
# {done, waiting, expired}.
SETTLE: Final = _script(r"""
local q = queue(1)
local action, now = ARGV[1], now_ms()
local expired, deadline = expire(q, now), now + tonumber(ARGV[2])
local before, done, is_news, deleted, bytes = earliest(q), 0, false, {}, 0

local function settle(sequence, deliveries, size, group)
  if action == 'delete' then
    deleted[#deleted + 1] = sequence
    redis.call('ZREM', q.l, sequence)
    bytes = bytes + size
    is_news = leave_group(q, group) or is_news
  elseif action == 'extend' or (action == 'release' and deadline > now) then
    redis.call('ZADD', q.l, deadline, sequence)
    if action == 'release' then remember(q, sequence, -deliveries, size, group) end
  else
    if action == 'return' then remember(q, sequence, deliveries - 1, size, group) end
    put_again(q, sequence, group)
    is_news = true
  end
end

for at = 3, #ARGV, 2 do
  local sequence, lease_ends = ARGV[at], redis.call('ZSCORE', q.l, ARGV[at])
  if lease_ends and tonumber(lease_ends) > now then
    local deliveries, size, group = parse_known(redis.call('HGET', q.d, sequence))
    if deliveries == tonumber(ARGV[at + 1]) then
      settle(sequence, deliveries, size, group)
      done = done + 1
    end
  end
end
-- Each command of a script is written to the append-only file: few for many messages.
for at = 1, #deleted, 1000 do
  local ids, last = {}, math.min(at + 999, #deleted)
  for index = at, last do ids[#ids + 1] = id(deleted[index]) end
  redis.call('XDEL', q.s, unpack(ids))
  redis.call('HDEL', q.d, unpack(deleted, at, last))
end
if bytes > 0 then redis.call('HINCRBY', q.c, 'bytes', -bytes) end
if is_news then
  wake(q)
elseif done > 0 and action ~= 'delete' then
  wake_for_deadline(q, before, deadline, now)
end
return {done, waiting(q), expired}
""")

# Gives {waiting, ms until the next deadline or -1, id of the last wake-up, expired}.
LOOK: Final = _script(r"""
local q = queue(1)
local now = now_ms()
local expired = expire(q, now)
local deadline, last = earliest(q), redis.call('XREVRANGE', q.w, '+', '-', 'COUNT', 1)[1]
return {waiting(q), deadline and deadline - now or -1, last and last[1] or '0-0', expired}
""")

# Gives {messages, bytes, waiting, leased, next, expired}, and the first message's sequence and record if there is one.
LEVEL: Final = _script(r"""
local q = queue(1)
local expired = expire(q, now_ms())
local reply = {redis.call('XLEN', q.s), counter(q, 'bytes'), waiting(q), redis.call('ZCARD', q.l),
               counter(q, 'last') + 1, expired}
local first = redis.call('XRANGE', q.s, '-', '+', 'COUNT', 1)[1]
if first then reply[7], reply[8] = sequence_of(first), fields(first).r end
return reply
""")

# The sequence, and how many at most. Gives how many are gone: fewer than that when it is done.
DELETE_BELOW: Final = _script(r"""
local q = queue(1)
expire(q, now_ms())
local below = math.min(tonumber(ARGV[1]), counter(q, 'last') + 1)
if below <= 1 then return 0 end
local page, is_news = redis.call('XRANGE', q.s, '-', '(' .. id(below), 'COUNT', ARGV[2]), false
for _, entry in ipairs(page) do
  local found = fields(entry)
  is_news = remove(q, sequence_of(entry), #found.r, found.g) or is_news
end
redis.call('HSET', q.c, 'cursor', text(math.max(counter(q, 'cursor'), below - 1)))
if is_news then wake(q) end
return #page
""")

# Gives {leases that were ended, waiting}.
END_LEASES: Final = _script(r"""
local q = queue(1)
local ended = 0
while redis.call('ZCARD', q.l) > 0 do ended = ended + expire(q, '+inf') end
if ended > 0 then wake(q) end
return {ended, waiting(q)}
""")

# A sequence. Gives whether it was there.
SET_ASIDE: Final = _script(r"""
local q = queue(1)
local entry = redis.call('XRANGE', q.s, id(ARGV[1]), id(ARGV[1]))[1]
if not entry then return 0 end
local found = fields(entry)
redis.call('HSET', q.x, ARGV[1], found.r)
if remove(q, ARGV[1], #found.r, found.g) then wake(q) end
return 1
""")

# The queue, and that of its dead letters; the sequence to begin behind, how many at most, messages_max, bytes_max.
# Gives {0, moved, the sequence to go on behind or -1}, or {1, messages} or {2, bytes} when the queue is full.
REDRIVE: Final = _script(r"""
local q, grave = queue(1), queue(1 + #KEYS / 2)
expire(grave, now_ms())
local page = redis.call('XRANGE', grave.s, '(' .. id(ARGV[1]), '+', 'COUNT', ARGV[2])
local chosen, size = {}, 0
for _, entry in ipairs(page) do
  if not redis.call('ZSCORE', grave.l, sequence_of(entry)) then
    chosen[#chosen + 1] = entry
    size = size + #fields(entry).r
  end
end
local messages, bytes = redis.call('XLEN', q.s), counter(q, 'bytes')
if #chosen > 0 and messages + #chosen > tonumber(ARGV[3]) then return {1, messages} end
if #chosen > 0 and bytes + size > tonumber(ARGV[4]) then return {2, bytes} end
for _, entry in ipairs(chosen) do
  local found = fields(entry)
  append(q, redis.call('HINCRBY', q.c, 'last', 1), found.r, found.g)
  remove(grave, sequence_of(entry), #found.r, found.g)
end
redis.call('HINCRBY', q.c, 'bytes', size)
if #chosen > 0 then wake(q) end
return {0, #chosen, #page > 0 and tonumber(sequence_of(page[#page])) or -1}
""")

# The name, its settings as they were read (nothing for a new queue), and as they shall be. Gives whether they are.
DEFINE: Final = _script(r"""
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
""")
