"""Deduplication in Redis: one script in Lua decides which messages of an enqueue are new, by covers, identities and
marks.

The times of identities and producers come from a steady clock of each physical queue (`steady` in `{q:i}:c`). It
advances with Redis's own clock (`seen`), never goes back, and advances by at most STEP_US between two enqueues. So a
clock that jumps makes a queue neither forget early nor remember for ever. `turn` counts the uses of covers. A field
`filter:` with a tag holds the turn and the text of a filter for which covers were made.

A cover (`queues.covers`) is a text of bounds, 19 digits each, because Lua's numbers are exact only up to 2^53. Texts of
equal length compare as their numbers do. Callers send the neighbours of the bounds that they add, so that Lua need not
calculate with them.
"""

from __future__ import annotations

from typing import Final

from tidegate.queues.covers import FILTERS_MAX, INTERVALS_MAX, TAG_BYTES
from tidegate.queues.store import PRODUCERS_MAX
from tidegate.queues.stores.redis_scripts import script

STEP_US: Final = 1_000_000
PLACE_DIGITS: Final = 19
# The number of arguments of the enqueue script that describe one run.
RUN_FIELDS: Final = 7

_COVERS: Final = (
    f"""
local STEP_US, DIGITS, TAG_BYTES = {STEP_US}, {PLACE_DIGITS}, {TAG_BYTES}
local BOUNDS_MAX, FILTERS_MAX = {2 * INTERVALS_MAX}, {FILTERS_MAX}
local PRODUCERS_MAX, RUN_FIELDS, STEP = {PRODUCERS_MAX}, {RUN_FIELDS}, 500
"""
    r"""
-- Returns the time of the steady clock, and Redis's time, which the next write stores with it.
local function steady_us(q)
  local time = redis.call('TIME')
  local now, seen = time[1] * 1000000 + time[2], counter(q, 'seen')
  if seen == 0 then return now, now end
  return counter(q, 'steady') + math.max(0, math.min(now - seen, STEP_US)), now
end

local function places_of(text)
  local places = {}
  for at = 1, #text, DIGITS do places[#places + 1] = string.sub(text, at, at + DIGITS - 1) end
  return places
end

local function read_cover(q, key) return places_of(redis.call('HGET', q.v, key) or '') end

local function is_covered(cover, place)
  for at = 1, #cover, 2 do
    if place < cover[at] then return false end
    if place <= cover[at + 1] then return true end
  end
  return false
end

-- Returns the cover with the interval from low to high, whose neighbours are below and above, and whether that extends
-- an existing interval. If there are too many, the shortest is removed, and the lowest among equals, but not the one
-- that has grown.
local function extended(cover, low, high, below, above)
  if #cover == 2 and cover[1] <= low and below <= cover[2] then
    return {cover[1], high > cover[2] and high or cover[2]}, true
  end
  local merged, is_in, is_near = {}, false, false
  local function add(first, last) merged[#merged + 1], merged[#merged + 2] = first, last end
  for at = 1, #cover, 2 do
    local first, last = cover[at], cover[at + 1]
    if last < below then
      add(first, last)
    elseif first > above then
      if not is_in then add(low, high) end
      is_in = true
      add(first, last)
    else
      is_near = true
      if first < low then low = first end
      if last > high then high = last end
    end
  end
  if not is_in then add(low, high) end
  if #merged > BOUNDS_MAX then
    local shortest, length
    for at = 1, #merged, 2 do
      local here = tonumber(merged[at + 1]) - tonumber(merged[at])
      if merged[at] ~= low and (not length or here < length) then shortest, length = at, here end
    end
    table.remove(merged, shortest)
    table.remove(merged, shortest)
  end
  return merged, is_near
end
"""
)

# Arguments:
# - messages_max, bytes_max, deduplication in microseconds, identities_max, make room (1 or 0);
# - producer and number of the batch if it has them; publishers_max;
# - the number of filters, and their texts; the number of runs;
# - for each run: its key, the index of its first entry, how many entries it has, the index of its filter among the
#   filters (0 for a put), one text of its low, its high, their neighbours and its places (no places for a single entry,
#   whose place is high), the tags of other filters whose matches are known, and these matches, a digit for each entry;
# - record, group and identity of each entry.
# Returns {0, duplicates, dropped, waiting, forgotten}; {1, messages} or {2, bytes} if the queue is full; {3, text} if
# the script needs the matches of the filter with this text.
ENQUEUE: Final = script(
    _COVERS
    + r"""
local q = queue(1)
local messages_max, bytes_max, kept_us = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local producer, number = ARGV[6], tonumber(ARGV[7])
local publishers_max, filters_count = tonumber(ARGV[8]), tonumber(ARGV[9])
local first_run = 11 + filters_count
local runs_count = tonumber(ARGV[first_run - 1])
local base = first_run + RUN_FIELDS * runs_count
local entries_count = (#ARGV - base + 1) / 3
if producer ~= '' and tonumber(redis.call('HGET', q.m, producer) or '0') >= number then
  return {0, entries_count, 0, waiting(q), 0}
end
local now_us, seen_us = steady_us(q)
local since_us = now_us - kept_us

-- Reads the covers of the runs together: few commands for many publishers.
local covers, keys = {}, {}
for at = first_run, base - 1, RUN_FIELDS do
  if not covers[ARGV[at]] then
    covers[ARGV[at]] = {}
    keys[#keys + 1] = ARGV[at]
  end
end
for at = 1, #keys, STEP do
  local found = redis.call('HMGET', q.v, unpack(keys, at, math.min(at + STEP - 1, #keys)))
  for index, cover in ipairs(found) do
    if cover then covers[keys[at + index - 1]] = places_of(cover) end
  end
end

local function cover_of(key)
  if not covers[key] then covers[key] = read_cover(q, key) end
  return covers[key]
end

-- The filters that covers were made for, by their tags, with the turn in which each came.
local filters = {}
if filters_count > 0 then
  local all = redis.call('HGETALL', q.c)
  for at = 1, #all, 2 do
    if string.sub(all[at], 1, 7) == 'filter:' then
      local turn, filter = string.match(all[at + 1], '^(%d+) (.*)$')
      filters[string.sub(all[at], 8)] = {turn = tonumber(turn), text = filter}
    end
  end
end

local function matches_of(run, tag)
  for at = 0, #run.tags / TAG_BYTES - 1 do
    if string.sub(run.tags, at * TAG_BYTES + 1, (at + 1) * TAG_BYTES) == tag then
      return string.sub(run.matches, at * run.count + 1, (at + 1) * run.count)
    end
  end
end

-- The state of entries: 'stored'; 'kept' if the cover will record them; nil if their identity must be remembered.
local known = {}

-- Marks the entries of a run that are stored. Returns the text of a filter whose matches it needs, or nil.
local function mark_stored(run)
  local cover, tag = covers[run.key], string.sub(run.key, 1, TAG_BYTES)
  local places = run.count == 1 and {run.high} or places_of(string.sub(run.text, 4 * DIGITS + 1))
  local is_new = #cover == 0 or cover[#cover] < places[1]
  for index, place in ipairs(places) do
    local is_stored = not is_new and is_covered(cover, place)
    known[run.first + index - 1] = is_stored and 'stored' or run.filter > 0 and 'kept' or nil
  end
  for other, filter in pairs(run.filter > 0 and filters or {}) do
    local theirs = other ~= tag and cover_of(other .. string.sub(run.key, TAG_BYTES + 1)) or {}
    local matches = #theirs > 0 and matches_of(run, other)
    for index, place in ipairs(#theirs > 0 and places or {}) do
      if known[run.first + index - 1] ~= 'stored' and is_covered(theirs, place) then
        if not matches then return filter.text end
        if string.sub(matches, index, index) == '1' then known[run.first + index - 1] = 'stored' end
      end
    end
  end
end

local tags = {}
for at = first_run, base - 1, RUN_FIELDS do
  local text = ARGV[at + 4]
  local run = {key = ARGV[at], first = tonumber(ARGV[at + 1]), count = tonumber(ARGV[at + 2]),
               filter = tonumber(ARGV[at + 3]), text = text, tags = ARGV[at + 5], matches = ARGV[at + 6],
               low = string.sub(text, 1, DIGITS), high = string.sub(text, DIGITS + 1, 2 * DIGITS)}
  local needed = mark_stored(run)
  if needed then return {3, needed} end
  local below, above = string.sub(text, 2 * DIGITS + 1, 3 * DIGITS), string.sub(text, 3 * DIGITS + 1, 4 * DIGITS)
  local is_near
  covers[run.key], is_near = extended(covers[run.key], run.low, run.high, below, above)
  if run.filter > 0 then
    tags[string.sub(run.key, 1, TAG_BYTES)] = ARGV[9 + run.filter]
  elseif is_near then
    for index = run.first, run.first + run.count - 1 do known[index] = known[index] or 'kept' end
  end
end

local fresh, seen, size, duplicates = {}, {}, 0, 0
local has_identities = redis.call('EXISTS', q.i) == 1
for index = 1, entries_count do
  local at = base + 3 * (index - 1)
  local identity = kept_us > 0 and ARGV[at + 2] or ''
  local came = 0
  if identity ~= '' and known[index] ~= 'stored' then
    came = seen[identity] or has_identities and tonumber(redis.call('ZSCORE', q.i, identity) or '0') or 0
  end
  if known[index] == 'stored' or (came > 0 and came >= since_us) then
    duplicates = duplicates + 1
  else
    fresh[#fresh + 1] = index
    size = size + #ARGV[at]
    if not known[index] then seen[identity] = now_us end
  end
end
if #fresh == 0 then return {0, duplicates, 0, waiting(q), 0} end

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

-- The first write: if Redis's memory is full, it is refused, and nothing has been changed.
local last = redis.call('HINCRBY', q.c, 'last', #fresh)
for _, entry in ipairs(dropped) do
  local found = fields(entry)
  remove(q, sequence_of(entry), #found.r, found.g)
end
for place, index in ipairs(fresh) do
  local at = base + 3 * (index - 1)
  append(q, last - #fresh + place, ARGV[at], ARGV[at + 1])
  if kept_us > 0 and ARGV[at + 2] ~= '' and not known[index] then
    redis.call('ZADD', q.i, now_us + place, ARGV[at + 2])
  end
end
if producer ~= '' then
  redis.call('HSET', q.m, producer, text(number))
  redis.call('ZADD', q.u, now_us, producer)
  for _, forgotten in ipairs(redis.call('ZRANGE', q.u, 0, -1 - PRODUCERS_MAX)) do
    redis.call('HDEL', q.m, forgotten)
    redis.call('ZREM', q.u, forgotten)
  end
end

local forgotten_count = 0
if #keys > 0 then
  local turn = redis.call('HINCRBY', q.c, 'turn', 1)
  for at = 1, #keys, STEP do
    local kept, used = {}, {}
    for index = at, math.min(at + STEP - 1, #keys) do
      kept[#kept + 1], kept[#kept + 2] = keys[index], table.concat(covers[keys[index]])
      used[#used + 1], used[#used + 2] = turn, keys[index]
    end
    redis.call('HSET', q.v, unpack(kept))
    redis.call('ZADD', q.p, unpack(used))
  end
  for _, forgotten in ipairs(redis.call('ZRANGE', q.p, 0, -1 - publishers_max)) do
    redis.call('HDEL', q.v, forgotten)
    redis.call('ZREM', q.p, forgotten)
    forgotten_count = forgotten_count + 1
  end
  for tag, filter in pairs(tags) do
    if not filters[tag] then
      filters[tag] = {turn = turn, text = filter}
      redis.call('HSET', q.c, 'filter:' .. tag, text(turn) .. ' ' .. filter)
    end
  end
  local by_age = {}
  for tag in pairs(filters) do by_age[#by_age + 1] = tag end
  table.sort(by_age, function(one, other) return filters[one].turn < filters[other].turn end)
  for at = 1, #by_age - FILTERS_MAX do redis.call('HDEL', q.c, 'filter:' .. by_age[at]) end
end
redis.call('HINCRBY', q.c, 'bytes', size)
redis.call('HSET', q.c, 'seen', text(seen_us), 'steady', text(now_us))
redis.call('ZREMRANGEBYSCORE', q.i, '-inf', '(' .. text(since_us))
redis.call('ZREMRANGEBYRANK', q.i, 0, -1 - ARGV[4])
wake(q)
return {0, duplicates, #dropped, waiting(q), forgotten_count}
"""
)

# Arguments: deduplication in microseconds, then identity, key of a cover (or empty) and place of each entry. Returns
# whether every entry came recently or is covered.
HAS: Final = script(
    _COVERS
    + r"""
local q = queue(1)
local since_us, covers = steady_us(q) - tonumber(ARGV[1]), {}
for at = 2, #ARGV, 3 do
  local identity, key, place = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if key ~= '' and not covers[key] then covers[key] = read_cover(q, key) end
  if (key == '' or not is_covered(covers[key], place))
    and tonumber(redis.call('ZSCORE', q.i, identity) or '0') < since_us then return 0 end
end
return 1
"""
)
