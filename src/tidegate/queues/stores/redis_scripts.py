"""The decisions that Redis makes, in Lua: each script is one atomic step, by Redis's own clock.

| key | type | holds |
|---|---|---|
| `{q:i}:s` | stream | messages: id `<sequence>-0`, field `r` the sealed record, `g` its group if it has one |
| `{q:i}:c` | hash | `last` sequence given to a message, `cursor` the last one taken, `bytes`; see `redis_enqueue` |
| `{q:i}:l` | sorted set | leases: sequence by deadline in milliseconds |
| `{q:i}:d` | hash | sequence: number of deliveries, size, group; as long as the message exists |
| `{q:i}:a` | sorted set | sequences to be delivered again |
| `{q:i}:b` | sorted set | group and sequence of messages behind others of their group that are leased |
| `{q:i}:g` | hash | group: how many of its messages are leased |
| `{q:i}:i` | sorted set | identities by the microsecond at which they came |
| `{q:i}:v` | hash | tag of a filter and digest of a publisher: its cover |
| `{q:i}:p` | sorted set | the same keys by the turn in which they were last used |
| `{q:i}:m` | hash | mark of a producer: the number of its last batch |
| `{q:i}:u` | sorted set | producers by the microsecond at which their last batch came |
| `{q:i}:w` | stream | one entry, replaced whenever more messages can be leased: it wakes blocked reads |
| `{q:i}:x` | hash | sequence: the corrupt record that was set aside |

Dead letters of `q` are in `{q:i}:dead:s` and so on, where field `h` holds their history. All keys of a script have one
hash tag, so that a Redis cluster can run it too. Invariant: a sequence is in at most one of l, a and b; a sequence in
none of them, and above the cursor, was never taken. `redis_enqueue` explains i, m, u, v and p.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

KEYS: Final = "sclabdgimuwxvp"
# The most messages that a script removes or moves: Redis serves nothing else in the meantime.
STEP_MESSAGES_MAX: Final = 1000
# A blocked read ends after this time to check deadlines; setting an earlier deadline wakes it.
BLOCK_MS: Final = 5000
BEHIND_MAX: Final = 10_000


class Script:
    """A script in Lua, and the hash by which Redis identifies it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


def script(body: str) -> Script:
    """Returns a script together with the functions that the scripts of queues share."""
    return Script(_KEYS_AND_BOUNDS + _SHARED + body)


_KEYS_AND_BOUNDS: Final = f"""
local EXPIRED_MAX, SOON_MS, BEHIND_MAX = 2000, {BLOCK_MS}, {BEHIND_MAX}
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

-- Deliveries are negative while a release is delayed, so that no receipt matches. An entry that an operator has removed
-- counts as never delivered.
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

-- Blocked readers wait for the earliest deadline that they knew: an earlier one must wake them.
local function wake_for_deadline(q, before, deadline, now)
  if deadline - now < SOON_MS and (not before or deadline < before) then wake(q) end
end

-- The length comes first, so that no group is a prefix of another.
local function behind(group) return string.format('%08x', #group) .. group end

local function set_behind(q, sequence, group)
  redis.call('ZADD', q.b, 0, behind(group) .. string.format('%016.0f', sequence))
end

-- Ends the lease of one message of a group; after the last one, the messages behind it become available. Returns
-- whether there were any.
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

-- Ends the leases whose deadline has passed. Returns how many of them had an owner. Its first write needs no memory:
-- after it, Redis lets a script continue even if its memory is full, so that consumers can empty the queue.
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

-- Removes a message, whatever its state is. Returns whether other messages of its group become available.
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

-- Makes a message a dead letter. `why` is empty for too many deliveries, and otherwise names another reason.
local function bury(q, grave, sequence, deliveries, found, now, why)
  append(grave, redis.call('HINCRBY', grave.c, 'last', 1), found.r, found.g,
         sequence .. ' ' .. deliveries .. ' ' .. text(now) .. why)
  redis.call('HINCRBY', grave.c, 'bytes', #found.r)
  return remove(q, sequence, #found.r, found.g)
end

-- Returns whether a record was enqueued before a time, which follows its checksum and its group, in MessagePack. For a
-- corrupt record it returns false; the corruption is detected when it is read.
local function is_older(found, before)
  local size = #found.g
  local place = 6 + size + (size < 32 and 1 or size < 256 and 2 or 3)
  if string.byte(found.r, place) ~= 0xcb or #found.r < place + 8 then return false end
  return struct.unpack('>d', found.r, place + 1) < before
end

local function counter(q, name) return tonumber(redis.call('HGET', q.c, name) or '0') end
"""

# Arguments: messages_max, bytes_max, visibility in ms, max_deliveries, leased_max, suspect after, the time before which
# a record is too old (or empty), whether such a record becomes a dead letter, and how many of them to remove. Keys: the
# queue, then its dead-letter queue if it has one. Returns {waiting, expired, redelivered, dead, too old}, then
# sequence, delivery, record and history of each message.
LEASE: Final = script(r"""
local q = queue(1)
local now = now_ms()
local expired = expire(q, now)
local messages_max = math.min(tonumber(ARGV[1]), tonumber(ARGV[5]) - redis.call('ZCARD', q.l))
local bytes_max, deadline, max_deliveries, suspect_after =
  tonumber(ARGV[2]), now + tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6])
local before, cursor = earliest(q), counter(q, 'cursor')
local old_before, is_old_dead, old_max = tonumber(ARGV[7]), ARGV[8] == '1', tonumber(ARGV[9])
local reply, leases, known, groups = {0, 0, 0, 0, 0}, {}, {}, {}
local count, size, redelivered, dead, old = 0, 0, 0, 0, 0

local function bury_here(sequence, deliveries, found, why)
  local grave = queue(1 + #KEYS / 2)
  bury(q, grave, sequence, deliveries, found, now, why)
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

-- Returns whether the message was taken from where it waited, and whether the lease may take more.
local function consider(sequence, deliveries, found, is_again)
  if old_before and is_older(found, old_before) then
    if old >= old_max then return false, false end
    old = old + 1
    if is_old_dead then
      bury_here(sequence, deliveries, found, ' old')
    else
      remove(q, sequence, #found.r, found.g)
    end
    return true, true
  end
  if found.g ~= '' and not groups[found.g] and redis.call('HEXISTS', q.g, found.g) == 1 then
    if not is_again and redis.call('ZCARD', q.b) >= BEHIND_MAX then return false, false end
    set_behind(q, sequence, found.g)
    return true, true
  end
  local delivery = deliveries + 1
  if max_deliveries > 0 and delivery > max_deliveries then
    bury_here(sequence, deliveries, found, '')
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
    local is_taken, may_continue = true, true
    if entry then
      local before = redis.call('HGET', q.d, sequence)
      is_taken, may_continue = consider(sequence, (parse_known(before)), fields(entry), true)
    else
      redis.call('HDEL', q.d, sequence)
    end
    if is_taken then redis.call('ZREM', q.a, sequence) end
    if not may_continue then return false end
  end
end

-- Pages are about as large as what is wanted: messages that are read and not taken cost time for nothing.
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
      local is_taken, may_continue = consider(sequence, 0, fields(entry), false)
      if is_taken then cursor = tonumber(sequence) end
      if not may_continue then return end
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
if old > 0 then wake(q) end
reply[1], reply[2], reply[3], reply[4], reply[5] = waiting(q), expired, redelivered, dead, old
return reply
""")

# Arguments: the action (delete, extend, release or return), its time in ms, then sequence and delivery of each receipt.
# Returns {done, waiting, expired}.
SETTLE: Final = script(r"""
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
-- Redis writes each command of a script to the append-only file, so few commands handle many messages.
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

# Returns {waiting, ms until the next deadline or -1, id of the last wake-up, expired}.
LOOK: Final = script(r"""
local q = queue(1)
local now = now_ms()
local expired = expire(q, now)
local deadline, last = earliest(q), redis.call('XREVRANGE', q.w, '+', '-', 'COUNT', 1)[1]
return {waiting(q), deadline and deadline - now or -1, last and last[1] or '0-0', expired}
""")

# Returns {messages, bytes, waiting, leased, next, expired, publishers}, and the first message's sequence and record if
# there is one.
LEVEL: Final = script(r"""
local q = queue(1)
local expired = expire(q, now_ms())
local reply = {redis.call('XLEN', q.s), counter(q, 'bytes'), waiting(q), redis.call('ZCARD', q.l),
               counter(q, 'last') + 1, expired, redis.call('ZCARD', q.p)}
local first = redis.call('XRANGE', q.s, '-', '+', 'COUNT', 1)[1]
if first then reply[8], reply[9] = sequence_of(first), fields(first).r end
return reply
""")

# Arguments: the sequence, and how many messages to delete at most. Returns how many were deleted; fewer than the
# maximum means that none is left.
DELETE_BELOW: Final = script(r"""
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

# Arguments: the time before which a message is too old, how many to remove at most, and whether they become dead
# letters. Keys: the queue, then its dead-letter queue. Returns {removed, waiting}.
EXPIRE: Final = script(r"""
local q, grave, now = queue(1), queue(1 + #KEYS / 2), now_ms()
expire(q, now)
local before, count_max, is_dead, gone, is_news = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1', 0, false
local page = math.min(2 * count_max, count_max + redis.call('ZCARD', q.l))
for _, entry in ipairs(redis.call('XRANGE', q.s, '-', '+', 'COUNT', page)) do
  local sequence, found = sequence_of(entry), fields(entry)
  if not redis.call('ZSCORE', q.l, sequence) then
    if gone == count_max or not is_older(found, before) then break end
    if is_dead then
      local deliveries = math.abs((parse_known(redis.call('HGET', q.d, sequence))))
      is_news = bury(q, grave, sequence, deliveries, found, now, ' old') or is_news
    else
      is_news = remove(q, sequence, #found.r, found.g) or is_news
    end
    gone = gone + 1
  end
end
if gone > 0 and is_dead then wake(grave) end
if is_news then wake(q) end
return {gone, waiting(q)}
""")

# Returns {leases that were ended, waiting}.
END_LEASES: Final = script(r"""
local q = queue(1)
local ended = 0
while redis.call('ZCARD', q.l) > 0 do ended = ended + expire(q, '+inf') end
if ended > 0 then wake(q) end
return {ended, waiting(q)}
""")

# Argument: a sequence. Returns whether it existed.
SET_ASIDE: Final = script(r"""
local q = queue(1)
local entry = redis.call('XRANGE', q.s, id(ARGV[1]), id(ARGV[1]))[1]
if not entry then return 0 end
local found = fields(entry)
redis.call('HSET', q.x, ARGV[1], found.r)
if remove(q, ARGV[1], #found.r, found.g) then wake(q) end
return 1
""")

# Keys: the queue, then its dead-letter queue. Arguments: the sequence after which to start, how many at most,
# messages_max, bytes_max. Returns {0, moved, the sequence after which to continue or -1}, or {1, messages} or {2,
# bytes} if the queue is full.
REDRIVE: Final = script(r"""
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

# Arguments: the name, its settings as they were read (empty for a new queue), and its new settings. Returns whether the
# new settings were stored.
DEFINE: Final = script(r"""
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
""")
