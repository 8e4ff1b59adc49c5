#include "host_meeting.h"

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host_reference.h"
#include "launch.h"

namespace muse {
namespace {

// The call of a rank.
struct Guest {
  VerifyArguments args;
  xla::ffi::Promise done;
  std::fenv_t arithmetic;  // of the thread it came on: XLA's flush subnormal numbers to zero
};

struct Meeting {
  int64_t run;
  std::vector<std::unique_ptr<Guest>> guests;  // of each rank, those that came in time
  std::vector<bool> came;                      // of each rank, in time or not
  std::condition_variable complete;
  bool failed = false;
  int32_t status[kStatusSize] = {};

  bool all_came() const { return std::find(came.begin(), came.end(), false) == came.end(); }
};

// Open meetings, and failed ones that somebody may still be on the way to. Never destroyed: threads outlive main.
std::mutex& mutex = *new std::mutex;
std::list<std::shared_ptr<Meeting>>& meetings = *new std::list<std::shared_ptr<Meeting>>;
constexpr size_t kMostMeetings = 64;

bool is_same_call(const VerifyArguments& x, const VerifyArguments& y) {
  return x.shape.ranks == y.shape.ranks && x.rows == y.rows && x.num_layers() == y.num_layers() && x.taps == y.taps &&
         x.trace_layer == y.trace_layer;
}

// Whether a call may belong to a meeting, which always has a guest.
bool fits(const Meeting& meeting, int64_t run, const VerifyArguments& args) {
  if (meeting.run != run || meeting.came.size() != static_cast<size_t>(args.shape.ranks)) return false;
  const auto is_there = [](const auto& guest) { return guest != nullptr; };
  const auto first = std::find_if(meeting.guests.begin(), meeting.guests.end(), is_there);
  return !meeting.came[*args.rank] && is_same_call((*first)->args, args);
}

// Of a meeting to which a rank did not come: the first that did has waited for the first that did not.
void fail(Meeting& meeting) {
  const auto first = [&](bool came) {
    return static_cast<int32_t>(std::find(meeting.came.begin(), meeting.came.end(), came) - meeting.came.begin());
  };
  const Failure failure{kDeadline, first(true), -1, kBeforePhases, 0, first(false), {}};
  static_assert(sizeof(failure) == sizeof(meeting.status), "the status is a Failure");
  std::memcpy(meeting.status, &failure, sizeof(failure));
  meeting.failed = true;
}

// A thread of its own for each meeting.
void host(const std::shared_ptr<Meeting>& meeting, std::chrono::milliseconds deadline) {
  {
    std::unique_lock<std::mutex> lock(mutex);
    if (!meeting->complete.wait_for(lock, deadline, [&] { return meeting->all_came(); })) fail(*meeting);
    // A failed one stays for those who are late, but not for ever.
    if (!meeting->failed || meetings.size() > kMostMeetings) meetings.remove(meeting);
  }
  // From here on nobody else touches the guests that came in time.
  std::string problem;
  if (!meeting->failed) {
    std::vector<const VerifyArguments*> calls;
    for (const auto& guest : meeting->guests) calls.push_back(&guest->args);
    std::fesetenv(&meeting->guests[0]->arithmetic);
    try {
      host_verify(calls);
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  for (const auto& guest : meeting->guests) {
    if (guest == nullptr) continue;
    if (meeting->failed) std::copy_n(meeting->status, kStatusSize, guest->args.status);
    // What comes after the call runs on the thread that completes it, and may wait for what comes after the others'.
    std::thread([guest = *guest, problem]() mutable {
      std::fesetenv(&guest.arithmetic);
      problem.empty() ? guest.done.SetAvailable() : guest.done.SetError(xla::ffi::Error::Internal(problem));
    }).detach();
  }
}

}  // namespace

xla::ffi::Future meet_peers(int64_t run, VerifyArguments args) {
  constexpr int64_t kLongest = int64_t{1000} * 1000 * 1000;  // more would be no time of a clock
  const std::chrono::milliseconds deadline(std::min(args.deadline_ms, kLongest));
  const int rank = *args.rank;
  xla::ffi::Promise done;
  xla::ffi::Future future(done);
  const std::lock_guard<std::mutex> lock(mutex);
  auto at = std::find_if(meetings.begin(), meetings.end(), [&](const auto& other) { return fits(*other, run, args); });
  const bool is_first = at == meetings.end();
  if (is_first) {
    at = meetings.insert(at, std::make_shared<Meeting>());
    (*at)->run = run;
    (*at)->guests.resize(args.shape.ranks);
    (*at)->came.resize(args.shape.ranks);
  }
  const std::shared_ptr<Meeting> meeting = *at;
  meeting->came[rank] = true;
  if (meeting->failed) {
    std::copy_n(meeting->status, kStatusSize, args.status);
    if (meeting->all_came()) meetings.erase(at);
    done.SetAvailable();
    return future;
  }
  meeting->guests[rank] = std::make_unique<Guest>(Guest{std::move(args), std::move(done), {}});
  std::fegetenv(&meeting->guests[rank]->arithmetic);
  if (is_first) std::thread(host, meeting, deadline).detach();
  if (meeting->all_came()) meeting->complete.notify_one();
  return future;
}

}  // namespace muse
