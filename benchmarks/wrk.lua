-- For wrk: sends the requests of a file in turn, and reports one JSON object.
-- Arguments: the file, whose requests each follow their length in a line, and the first one to send.

local requests, place = {}, 0
local threads = {}

function setup(thread)
  threads[#threads + 1] = thread
  thread:set("number", #threads)
end

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  for length in file:lines() do
    requests[#requests + 1] = file:read(tonumber(length))
  end
  file:close()
  place = tonumber(arguments[2]) + number * 37
end

function request()
  place = place % #requests + 1
  return requests[place]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    '{"requests":%d,"seconds":%.6f,"p50_us":%d,"p99_us":%d,"maximum_us":%d,"failures":%d}\n',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50), latency:percentile(99), latency.max,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
