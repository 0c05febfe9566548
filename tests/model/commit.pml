/* The commit and recovery protocol, for spin. tests/model/run.sh checks it.
 *
 * One replica: an engine, whose control stream is at node 0, and two workers,
 * one on each of two nodes, or both on node 0. A coordinator with its journal,
 * and perhaps another one. Update 0 is committed and installed at the start;
 * others are published on top of it.
 *
 * Where the rules live in the daemon:
 *   coordinator  daemon/coordinator: update_machine (OFFER, APPLY), Settle in
 *                core_install.cc, core_fetch.cc (INSTALL), replica_machine (engine, workers),
 *                core_recovery.cc. COMMIT is in the journal before it is told.
 *   node         daemon/service: relays, says what its clients hold when it
 *                dials; daemon/node/away.h while nobody answers.
 *   engine       client/cc/replica.cc: one command after the other.
 *   worker       client/cc/worker.cc: INSTALLED(u) -> WRITING -> INSTALLED(v).
 *
 * What is left out: bytes (an update that is offered is VERIFIED, and has a
 * holder for ever, so that none is LOST), other replicas (to this one they are
 * an update that fails before its COMMIT), STREAM, PAUSE_MODE_NONE, operators'
 * pauses, hooks that fail. SUPERSEDED is here an abort that is followed by the
 * next offer.
 *
 * Messages: between the coordinator and a client lies one queue down, and one
 * queue up for each node. When a node's stream breaks, what is on its way up is
 * lost, and of each queue down any suffix. Deadlines pass when nothing else can
 * happen, and `haste` times before that.
 *
 * What may happen, and how often, comes from the environment, so that one
 * compiled checker serves all configurations of run.sh:
 *   UPDATES    updates that are published, one after the other
 *   CRASHES    of a coordinator, a node's daemon, the engine with its workers
 *   BREAKS     of the stream of a node to the coordinator
 *   LOSSES     of one command, which its client never answers
 *   FAILS      of a copy into live memory, which stays a mix
 *   ABORTS     an update fails before its COMMIT (a rank, another replica)
 *   HASTE      deadlines that pass although nothing was lost
 *   ROLLBACKS  somebody asks for update 0
 *   SECONDS    another coordinator starts while the old one goes on believing:
 *              1: with the same journal, which is no longer the old one's
 *              2: with an empty journal
 *   ONE_NODE   1: both workers are on node 0
 *   MUTANT     a rule that is left out, by its number below
 * All are finite, and so is every history that does not run in a circle.
 *
 * What is asserted is under "The promises". That something always ends: there
 * are no invalid end states (a history ends only where GOOD), and no circles in
 * which nothing is GOOD (run.sh checks non-progress).
 */

c_decl {
static int FromEnvironment(const char* name) {
  const char* text = getenv(name);
  return text == NULL ? 0 : atoi(text);
}
}

byte updates, crashes, breaks, losses, fails, aborts, haste, rollbacks, seconds;
byte mutant;
bool one_node;
bool second_was; /* the other coordinator has come */

/* Rules of the protocol. MUTANT leaves one out. */
#define TELL_FIRST 1      /* COMMIT is in the journal before anybody is told */
#define ANY_TERM 2        /* a node follows no older term than it has seen */
#define ONE_IS_ALL 3      /* all workers have it before the engine resumes */
#define ANY_ANSWER 4      /* an answer counts for its own command alone */
#define NO_DOUBT 5        /* who was told and has not answered may be writing */
#define FORGETS_COMMIT 6  /* what is wanted is the journal's last COMMIT */
#define EMPTY_JOURNAL 7   /* JOURNAL_LOST: an empty journal commands nobody */
#define NO_DEADLINE 8     /* every wait has a deadline */
#define REFUSES_APART 9   /* an offer is refused only where all workers are */
#define SAYS_DONE 10      /* a worker is WRITING until its last byte */
#define STRAY_PAUSE 11    /* an engine that stands still unasked is resumed */
#define REFUSES_MIX 12    /* an offer is refused only when all workers agree */
#define FORGETS_TERM 13   /* a node's newest term outlives its daemon */
#define SAYS_OLD 14       /* for its node, who was told is WRITING */
#define SENDS_EARLY 15    /* nothing is sent to a node before it has said all */
#define KEEPS_OFFER 16    /* another update is another pause: its node knows */
#define LEFT(rule) (mutant == rule)

#define K 2
#define HOST(w) (one_node -> 0 : w)

/* What lies in a worker's memory: 0 up to `updates`, or: */
#define OWN 6 /* what the engine came with */
#define WRITING 7

/* Commands and reports. */
#define PAUSE 1   /* command; the node may give it up, unless it is: */
#define FIRM 7
#define RESUME 2  /* command; 0: by the node itself */
#define PAUSED 3  /* command */
#define RESUMED 4 /* command */
#define APPLIED 5 /* worker, command, content */
#define FAILED 6  /* worker, command: it holds a mix */
#define JOIN 8    /* + incarnation; paused + 2 * fresh, content, content */

chan to_engine = [6] of { byte, byte, byte }; /* what, command, update */
chan to_worker[2] = [4] of { byte, byte };    /* update, command */
chan up[2] = [8] of { byte, byte, byte, byte };

/* ---- Live memory and engine: the truth ---- */

#define STILL 0
#define RUNS 1
#define LATE_PAUSE 2  /* a hook runs whose stream has ended: STILL is next */
#define LATE_RESUME 3 /* it generates, and nobody is told */
byte engine = RUNS;
byte incarnation;
byte word[2];
byte becomes[2]; /* WRITING: what; or MIX: nobody writes any more */
byte answers[2]; /* to which command; 0: nobody hears it */
#define MIX 7

/* ---- Disks ---- */

byte j_term;
byte j_opened; /* the newest update that was given out */
byte j_commit; /* the newest that was committed */
bool j_ended = true; /* j_opened has ended, or is j_commit */
bool j_held;   /* a rollback holds the replica on update 0 */

/* ---- Nodes ---- */

byte link[2];  /* to coordinator link - 1; 0: none */
byte n_term[2];
bool fresh[2];     /* the daemon was started again */
bool rejoin[2];    /* clients came back, which has to be said */
bool n_paused;     /* node 0's belief of the engine */
byte n_offer;      /* the update + 1 that the engine is paused for; 0: none. */
bool n_refusable;  /* It may be refused, */
bool n_commit;     /* it is known to be committed */

/* ---- Coordinators ---- */

#define IDLE 0
#define OFFER 1   /* held for j_opened, not committed */
#define APPLY 2   /* committed: held until it is installed */
#define INSTALL 3 /* a late join, a repair, a rollback */

#define RUNNING 0
#define PAUSING 1
#define IS_PAUSED 2
#define DOUBTFUL 3
#define RESUMING 4

/* What happens to one, if it is no report; `n`: at which node. */
#define AWAY 20
#define PUBLISH 21
#define ABORT 22
#define COMMIT 23
#define ROLLBACK 24
#define DEADLINE 25
#define STOP 26
#define BEGIN 27
#define COMMIT_WITHOUT 28 /* the replica, which has left */

byte term[K];    /* 0: it does not run; it starts first */
byte commit[K];  /* the newest committed update */
bool held[K];    /* rolled back */
byte phase[K];
bool fenced[K];
bool begun[K];   /* workers are told to install WANTED */
byte view[K];    /* of the engine */
byte command[K]; /* the Pause or Resume in flight */
byte paused_for[K];
byte life[K];     /* the incarnation it knows */
typedef Pair { byte w[2] };
Pair seen[K];     /* the workers' words */
Pair told[K];     /* the Apply in flight; 0: none */
Pair given_up[K]; /* one of the same install before it */
Pair here[K];     /* by node: its clients have joined */

/* Nobody's state: used within one step. */
byte x, y, z, n, what, keep, i;
bool was_servable;

/* ---- The promises ---- */

byte served;      /* the newest update that this engine generated with */
bool rolled_back; /* somebody asked for an older one */

bool serves_while_writing, serves_a_mix, serves_uncommitted, serves_older,
    commit_undone;

proctype promises() {
end:
  do
  :: d_step { engine != STILL && (word[0] == WRITING || word[1] == WRITING) ->
       serves_while_writing = true; assert(!serves_while_writing) }
  :: d_step { engine != STILL && word[0] != WRITING && word[1] != WRITING &&
              word[0] != word[1] ->
       serves_a_mix = true; assert(!serves_a_mix) }
  :: d_step { engine != STILL && word[0] == word[1] && word[0] <= updates &&
              word[0] > j_commit ->
       serves_uncommitted = true; assert(!serves_uncommitted) }
  :: d_step { engine != STILL && word[0] == word[1] && word[0] < served ->
       serves_older = true; assert(!serves_older) }
  od
}

/* A worker that holds a committed update is told to write an older one. */
inline look_at_write(w, u) {
  if
  :: !rolled_back && word[w] <= updates && u < word[w] && word[w] <= j_commit ->
     commit_undone = true; assert(!commit_undone)
  :: else
  fi
}

inline goes() {
  if
  :: !rolled_back && word[0] == word[1] && word[0] <= updates ->
     served = word[0]
  :: else
  fi
}

/* ---- Streams ---- */

/* The first `keep` of what is on its way to a client have reached it. */
inline shorten_engine() {
  i = len(to_engine); keep = 0;
  do
  :: keep < i -> keep++
  :: break
  od;
  do
  :: i > 0 ->
     i--;
     to_engine ? x, y, z;
     if
     :: y == 0 -> to_engine ! x, y, z
     :: y != 0 && keep > 0 -> keep--; to_engine ! x, y, z
     :: else
     fi
  :: else -> break
  od;
  x = 0; y = 0; z = 0; keep = 0
}
inline shorten_worker(w) {
  i = len(to_worker[w]); keep = 0;
  do
  :: keep < i -> keep++
  :: break
  od;
  do
  :: i > 0 ->
     i--;
     to_worker[w] ? x, y;
     if
     :: y == 0 -> to_worker[w] ! x, y
     :: y != 0 && keep > 0 -> keep--; to_worker[w] ! x, y
     :: else
     fi
  :: else -> break
  od;
  x = 0; y = 0; keep = 0
}
inline cut(n) {
  link[n] = 0;
  do
  :: nempty(up[n]) -> up[n] ? _, _, _, _
  :: empty(up[n]) -> break
  od;
  if
  :: n == 0 -> shorten_engine(); shorten_worker(0)
  :: else
  fi;
  if
  :: n == HOST(1) -> shorten_worker(1)
  :: else
  fi
}
inline drop_engine() {
  do
  :: nempty(to_engine) -> to_engine ? _, _, _
  :: empty(to_engine) -> break
  od
}
inline drop_worker(w) {
  do
  :: nempty(to_worker[w]) -> to_worker[w] ? _, _
  :: empty(to_worker[w]) -> break
  od
}

/* What a node says of its worker. */
#define SAID(w)                                                            \
  (word[w] == WRITING && LEFT(SAYS_DONE) -> becomes[w] :                   \
  (len(to_worker[w]) > 0 && !LEFT(SAYS_OLD) -> WRITING : word[w]))

inline say_join(n) {
  up[n] ! JOIN + incarnation, (n == 0 && n_paused) + 2 * fresh[n],
    (n == HOST(0) -> SAID(0) : 0), (n == HOST(1) -> SAID(1) : 0);
  fresh[n] = false;
  rejoin[n] = false
}

/* ---- Clients ---- */

inline answer(n, what, p, q, r) {
  if
  :: link[n] != 0 -> up[n] ! what, p, q, r
  :: else /* the next JOIN says it */
  fi
}

inline forget_offer() {
  n_offer = 0; n_refusable = false; n_commit = false
}

proctype engine_control() {
end:
  do
  :: atomic { (engine == STILL || engine == RUNS) && nempty(to_engine) ->
       to_engine ? x, y, z;
       if
       :: x != RESUME ->
          engine = STILL; n_paused = true;
          n_commit = n_commit && n_offer == z + 1;
          n_offer = z + 1; n_refusable = (x == PAUSE);
          answer(0, PAUSED, y, 0, 0)
       :: x == RESUME ->
          engine = RUNS; n_paused = false; forget_offer(); goes();
          if
          :: y != 0 -> answer(0, RESUMED, y, 0, 0)
          :: else
          fi
       fi;
       x = 0; y = 0; z = 0 }
  :: d_step { engine == LATE_PAUSE -> engine = STILL }
  :: d_step { engine == LATE_RESUME -> engine = RUNS }
  od
}

proctype worker(bit w) {
end:
  do
  :: atomic { (word[w] != WRITING || becomes[w] == MIX) &&
              nempty(to_worker[w]) ->
       to_worker[w] ? x, y;
       n_commit = n_commit || HOST(w) == 0 && n_offer == x + 1;
       if
       :: word[w] == x && y != 0 -> answer(HOST(w), APPLIED, w, y, x)
       :: word[w] == x && y == 0 -> skip
       :: else ->
          look_at_write(w, x);
          word[w] = WRITING; becomes[w] = x; answers[w] = y
       fi;
       x = 0; y = 0 }
  :: atomic { word[w] == WRITING && becomes[w] != MIX ->
       word[w] = becomes[w];
       if
       :: answers[w] != 0 -> answer(HOST(w), APPLIED, w, answers[w], word[w])
       :: else
       fi;
       becomes[w] = 0; answers[w] = 0 }
  :: atomic { word[w] == WRITING && becomes[w] != MIX && fails > 0 ->
       fails--;
       if
       :: answers[w] != 0 -> answer(HOST(w), FAILED, w, answers[w], 0)
       :: else
       fi;
       becomes[w] = MIX; answers[w] = 0 }
  od
}

/* ---- Nodes ---- */

/* An empty journal knows nothing of the node's cluster. */
#define FOREIGN(k) (k == 1 && seconds == 2)
#define OBEYS(m, k)                              \
  ((n_term[m] <= term[k] || LEFT(ANY_TERM)) &&   \
   (!FOREIGN(k) || LEFT(EMPTY_JOURNAL)))

#define BUSY(w) \
  (word[w] == WRITING && becomes[w] != MIX || len(to_worker[w]) > 0)
/* The coordinator is away, and the engine stands still for an update. */
#define ALONE                                                        \
  (link[0] == 0 && n_paused && n_offer != 0 && engine == STILL &&    \
   !BUSY(0) && (one_node && !BUSY(1) || LEFT(REFUSES_APART)))

inline dial(n, k) {
  link[n] = k + 1;
  n_term[n] = term[k];
  say_join(n)
}

inline resume_alone() {
  forget_offer();
  to_engine ! RESUME, 0, 0
}

proctype node(bit m) {
end:
  do
  :: atomic { link[m] == 0 && term[0] != 0 && OBEYS(m, 0) ->
       dial(m, 0) }
  :: atomic { link[m] == 0 && term[1] != 0 && OBEYS(m, 1) ->
       dial(m, 1) }
  :: atomic { link[m] != 0 && rejoin[m] -> say_join(m) }
  /* barrier_timeout: the offer is refused, and the old update served. */
  :: d_step { m == 0 && ALONE && n_refusable && !n_commit &&
              word[0] != WRITING &&
              (word[0] == word[1] || LEFT(REFUSES_MIX) ||
               LEFT(REFUSES_APART)) ->
       resume_alone() }
  /* Past the COMMIT it finishes by itself. */
  :: d_step { m == 0 && ALONE && one_node && n_commit &&
              word[0] == n_offer - 1 && word[1] == n_offer - 1 ->
       resume_alone() }
  :: d_step { m == 0 && ALONE && one_node && n_commit &&
              word[0] != n_offer - 1 ->
       to_worker[0] ! n_offer - 1, 0 }
  :: d_step { m == 0 && ALONE && one_node && n_commit &&
              word[1] != n_offer - 1 ->
       to_worker[1] ! n_offer - 1, 0 }
  od
}

/* ---- Coordinators ---- */

#define COMPLETE(k) (here[k].w[0] && (one_node || here[k].w[1]))
#define WANTED(k) (held[k] -> 0 : commit[k])
#define INSTALLED(k)                            \
  (seen[k].w[0] == WANTED(k) &&                 \
       (seen[k].w[1] == WANTED(k) || LEFT(ONE_IS_ALL)))
#define SERVABLE(k)                                             \
  (seen[k].w[0] == seen[k].w[1] && seen[k].w[0] != WRITING ||   \
   LEFT(ONE_IS_ALL))
/* Numbers that nothing in flight has, so that few are enough. Those of the
 * daemon grow. */
#define USED_COMMAND(k, c)                                                \
  (to_engine ?? [_, eval(c), _] || up[0] ?? [PAUSED, eval(c), _, _] ||    \
   up[0] ?? [RESUMED, eval(c), _, _] || command[1 - k] == c)
#define USED_APPLY(k, v, c)                                               \
  (to_worker[v] ?? [_, eval(c)] || answers[v] == c ||                     \
   up[HOST(v)] ?? [APPLIED, eval(v), eval(c), _] ||                       \
   up[HOST(v)] ?? [FAILED, eval(v), eval(c), _] ||                        \
   given_up[k].w[v] == c || told[1 - k].w[v] == c ||                      \
   given_up[1 - k].w[v] == c)

/* A command arrives: the stream is whole, its client there. Nothing is sent to
 * a node between its hello and what it says after that of its clients. */
#define REACHES(k, m)                                            \
  (link[m] == k + 1 && life[k] == incarnation &&                 \
   (!(up[m] ?? [eval(JOIN + incarnation), _, _, _]) ||           \
    LEFT(SENDS_EARLY) &&                                         \
        !(up[m] ?? [eval(JOIN + incarnation), 2, _, _]) &&       \
        !(up[m] ?? [eval(JOIN + incarnation), 3, _, _])))

/* An update's pause, not one for an install. */
#define MAY_REFUSE(k)                             \
  ((one_node || LEFT(REFUSES_APART)) &&           \
   (phase[k] == OFFER || phase[k] == APPLY) &&    \
   (SERVABLE(k) || was_servable))

/* Sends `x` to the engine. */
inline send(k) {
  y = 1;
  do
  :: USED_COMMAND(k, y) -> y++
  :: !(USED_COMMAND(k, y)) -> break
  od;
  command[k] = y;
  x = (x == PAUSE && !MAY_REFUSE(k) -> FIRM : x);
  if
  :: REACHES(k, 0) -> to_engine ! x, y, paused_for[k]
  :: else /* into a stream that has broken */
  fi
}

/* Tells worker `x`. */
inline send_apply(k) {
  y = 1;
  do
  :: USED_APPLY(k, x, y) -> y++
  :: !(USED_APPLY(k, x, y)) -> break
  od;
  told[k].w[x] = y;
  if
  :: REACHES(k, HOST(x)) &&
     (HOST(x) != 0 || n_paused) /* or the node refuses: REPLICA_RUNNING */ ->
     to_worker[x] ! WANTED(k), y
  :: else
  fi
}

inline forget_answers(k) {
  told[k].w[0] = 0; told[k].w[1] = 0;
  given_up[k].w[0] = 0; given_up[k].w[1] = 0
}

/* Gives up an install. Who was told and has not answered may be writing. */
inline forget_target(k) {
  if
  :: begun[k] && told[k].w[0] != 0 && !LEFT(NO_DOUBT) -> seen[k].w[0] = WRITING
  :: else
  fi;
  if
  :: begun[k] && told[k].w[1] != 0 && !LEFT(NO_DOUBT) -> seen[k].w[1] = WRITING
  :: else
  fi;
  begun[k] = false
}

#define PAUSE_FOR(k) (phase[k] == OFFER -> j_opened : WANTED(k))
#define FOR_ANOTHER(k) \
  (phase[k] != IDLE && paused_for[k] != PAUSE_FOR(k) && !LEFT(KEEPS_OFFER))

/* What is wanted of the replica, and what that takes. */
inline reconcile(k) {
  if
  :: phase[k] == IDLE && !INSTALLED(k) && !fenced[k] -> phase[k] = INSTALL
  :: phase[k] >= APPLY && INSTALLED(k) ->
     phase[k] = IDLE; begun[k] = false; forget_answers(k)
  :: else
  fi;
  x = 0;
  if
  :: phase[k] != IDLE || !SERVABLE(k) || fenced[k] ->
     if
     :: view[k] == RUNNING || view[k] == RESUMING || view[k] == DOUBTFUL ||
        view[k] == IS_PAUSED && FOR_ANOTHER(k) ->
        view[k] = PAUSING; x = PAUSE; paused_for[k] = PAUSE_FOR(k)
     :: else
     fi
  :: else ->
     if
     :: view[k] == PAUSING || view[k] == IS_PAUSED || view[k] == DOUBTFUL ->
        view[k] = RESUMING; x = RESUME
     :: else
     fi
  fi;
  if
  :: x != 0 -> send(k)
  :: else
  fi;
  if
  :: view[k] == IS_PAUSED && phase[k] >= APPLY ->
     if
     :: !begun[k] -> begun[k] = true; fenced[k] = false; forget_answers(k)
     :: else
     fi;
     x = 0;
     do
     :: x < 2 && told[k].w[x] == 0 && seen[k].w[x] != WANTED(k) ->
        send_apply(k); x++
     :: x < 2 && !(told[k].w[x] == 0 && seen[k].w[x] != WANTED(k)) -> x++
     :: x == 2 -> break
     od
  :: else
  fi
}

inline write_commit(k) {
  j_commit = j_opened; j_ended = true; commit[k] = j_opened
}

/* It starts, with what is in the journal. */
inline begin(k) {
  j_term = (FOREIGN(k) -> j_term : j_term + 1);
  term[k] = (FOREIGN(k) -> 1 : j_term);
  if
  :: FOREIGN(k) -> skip
  :: else ->
     commit[k] =
       (LEFT(FORGETS_COMMIT) && j_commit > 0 -> j_commit - 1 : j_commit);
     held[k] = j_held;
     j_ended = true /* what was not committed is aborted */
  fi;
  life[k] = incarnation;
  seen[k].w[0] = WRITING; seen[k].w[1] = WRITING
}

inline stop(k) {
  term[k] = 0; commit[k] = 0; held[k] = false;
  phase[k] = IDLE; begun[k] = false; fenced[k] = false; view[k] = 0;
  command[k] = 0; paused_for[k] = 0; life[k] = 0;
  seen[k].w[0] = 0; seen[k].w[1] = 0; forget_answers(k);
  here[k].w[0] = 0; here[k].w[1] = 0;
  n = 0;
  do
  :: n < 2 && link[n] == k + 1 -> cut(n); n++
  :: n < 2 && link[n] != k + 1 -> n++
  :: n == 2 -> break
  od
}

/* The node's clients have gone. The update goes on without the replica; after
 * its COMMIT it is mended when it is back. */
inline leave(k, n) {
  if
  :: COMPLETE(k) ->
     forget_target(k);
     if
     :: phase[k] == OFFER -> what = COMMIT_WITHOUT
     :: else -> phase[k] = IDLE
     fi
  :: else
  fi;
  here[k].w[n] = false
}

#define IS_MINE(k, c) (command[k] == c || LEFT(ANY_ANSWER))

inline take_report(k) {
  if
  :: what >= JOIN ->
     /* x: paused + 2 * fresh. The control stream joins before the workers. */
     was_servable = SERVABLE(k);
     life[k] = what - JOIN;
     fenced[k] = false;
     what = 0;
     if
     :: x >= 2 -> leave(k, n)
     :: else
     fi;
     here[k].w[n] = true;
     if
     :: n == 0 -> command[k] = 0; view[k] = ((x & 1) -> DOUBTFUL : RUNNING)
     :: else
     fi;
     if
     :: n == HOST(0) -> seen[k].w[0] = y; told[k].w[0] = 0; given_up[k].w[0] = 0
     :: else
     fi;
     if
     :: n == HOST(1) -> seen[k].w[1] = z; told[k].w[1] = 0; given_up[k].w[1] = 0
     :: else
     fi
  :: what == PAUSED && view[k] == PAUSING && IS_MINE(k, x) ->
     view[k] = IS_PAUSED; command[k] = 0;
     what = (phase[k] == OFFER && COMPLETE(k) && !FOR_ANOTHER(k) ->
             COMMIT : 0)
  :: what == PAUSED && view[k] == RUNNING && !LEFT(STRAY_PAUSE) ->
     /* Of an older command, whose hook ended after the engine's node had said
      * that it runs. */
     view[k] = DOUBTFUL; what = 0
  :: what == RESUMED && view[k] == RESUMING && IS_MINE(k, x) ->
     view[k] = RUNNING; command[k] = 0
  :: what == APPLIED && here[k].w[n] ->
     /* x: worker, y: command, z: content */
     if
     :: (!begun[k] || z != WANTED(k)) && told[k].w[x] == y ->
        seen[k].w[x] = z; told[k].w[x] = 0
     :: begun[k] && z == WANTED(k) && seen[k].w[x] != z &&
        (told[k].w[x] == y || given_up[k].w[x] == y) ->
        seen[k].w[x] = z; told[k].w[x] = 0; given_up[k].w[x] = 0
     :: else
     fi
  :: what == FAILED && here[k].w[n] && begun[k] && told[k].w[x] == y ->
     seen[k].w[x] = WRITING; told[k].w[x] = 0;
     if
     :: true /* it is tried again */
     :: true -> fenced[k] = true; forget_target(k); phase[k] = IDLE
     fi
  :: what == FAILED && here[k].w[n] && !begun[k] && told[k].w[x] == y ->
     told[k].w[x] = 0
  :: else
  fi
}

#define TOLD(k, v) (begun[k] && told[k].w[v] != 0)

inline deadline(k) {
  if
  :: command[k] != 0 ->
     command[k] = 0;
     what = (view[k] == PAUSING && phase[k] == OFFER -> ABORT : 0);
     view[k] = DOUBTFUL
  :: command[k] == 0 ->
     x = (TOLD(k, 0) -> 0 : 1);
     given_up[k].w[x] = told[k].w[x]; told[k].w[x] = 0;
     seen[k].w[x] = WRITING
  fi
}

#define WAITS(k) (COMPLETE(k) && (command[k] != 0 || TOLD(k, 0) || TOLD(k, 1)))

#define HEARS(k, m) (link[m] == k + 1 && len(up[m]) > 0)
/* Clients of another incarnation. They are refused, and come again, while some
 * of the old one are known; what was said for the dead is just refused. */
#define STRANGER(k, m)                                                \
  (HEARS(k, m) && !(up[m] ? [PAUSED, _, _, _]) &&                      \
   !(up[m] ? [RESUMED, _, _, _]) && !(up[m] ? [APPLIED, _, _, _]) &&   \
   !(up[m] ? [FAILED, _, _, _]) &&                                     \
   !(up[m] ? [eval(JOIN + life[k]), _, _, _]))
#define OF_THE_LIVING(m) (up[m] ? [eval(JOIN + incarnation), _, _, _])
#define WAITS_OUTSIDE(k, m) (STRANGER(k, m) && OF_THE_LIVING(m) && ANY_HERE(k))
#define IS_DEAD(k, m) (STRANGER(k, m) && !(OF_THE_LIVING(m)) && ANY_HERE(k))
#define ANY_HERE(k) (here[k].w[0] || here[k].w[1])

#define QUIET                                                          \
  (empty(to_engine) && empty(to_worker[0]) && empty(to_worker[1]) &&   \
   empty(up[0]) && empty(up[1]))
/* Where a history may end: the replica serves what is wanted of it, or stands
 * still, fenced, and waits for another update. */
#define GOOD(k)                                                           \
  (term[k] == j_term && !FOREIGN(k) && phase[k] == IDLE && COMPLETE(k) && \
   j_ended && (j_opened == updates || j_held) && QUIET &&                 \
   (view[k] == RUNNING && engine == RUNS && word[0] == word[1] &&         \
        word[0] == (j_held -> 0 : j_commit) ||                            \
    fenced[k] && view[k] == IS_PAUSED && engine == STILL))

#define TOLD_FIRST(k) (LEFT(TELL_FIRST) && commit[k] > j_commit)

proctype coordinator(bit k) {
  do
  :: atomic {
       if
       /* Mutant: the record comes after the telling, or it dies before that. */
       :: TOLD_FIRST(k) -> write_commit(k)
       :: !TOLD_FIRST(k) && HEARS(k, 0) && !WAITS_OUTSIDE(k, 0) &&
          !IS_DEAD(k, 0) ->
          n = 0; up[0] ? what, x, y, z
       :: !TOLD_FIRST(k) && HEARS(k, 1) && !WAITS_OUTSIDE(k, 1) &&
          !IS_DEAD(k, 1) ->
          n = 1; up[1] ? what, x, y, z
       :: IS_DEAD(k, 0) -> up[0] ? _, _, _, _
       :: IS_DEAD(k, 1) -> up[1] ? _, _, _, _
       /* Longer than node_reconnect_grace, or another incarnation is there. */
       :: term[k] != 0 && here[k].w[0] &&
          (link[0] != k + 1 || WAITS_OUTSIDE(k, 0)) -> n = 0; what = AWAY
       :: term[k] != 0 && here[k].w[1] &&
          (link[1] != k + 1 || WAITS_OUTSIDE(k, 1)) -> n = 1; what = AWAY
       :: term[k] == j_term && phase[k] == IDLE && COMPLETE(k) &&
          j_ended && j_opened < updates && !held[k] && !FOREIGN(k) ->
          what = PUBLISH
       :: term[k] != 0 && phase[k] == OFFER && aborts > 0 ->
          aborts--; what = ABORT
       :: term[k] == j_term && phase[k] != OFFER && phase[k] != APPLY &&
          rollbacks > 0 && commit[k] > 0 -> rollbacks--; what = ROLLBACK
       :: WAITS(k) && haste > 0 -> haste--; what = DEADLINE
       :: timeout && WAITS(k) && !LEFT(NO_DEADLINE) -> what = DEADLINE
       :: term[k] != 0 && crashes > 0 -> crashes--; what = STOP
       :: k == 0 && term[0] == 0 && (term[1] == 0 || FOREIGN(1)) ->
          what = BEGIN
       :: k == 1 && term[1] == 0 && term[0] != 0 && !second_was ->
          second_was = true; what = BEGIN
       :: term[k] != 0 && (term[k] < j_term || FOREIGN(k)) -> what = STOP
       fi;
       if
       :: what < AWAY && what != 0 -> take_report(k)
       :: what == AWAY -> what = 0; leave(k, n)
       :: what == DEADLINE -> what = 0; deadline(k)
       :: what == PUBLISH ->
          j_opened++; j_ended = false; phase[k] = OFFER;
          what = (view[k] == IS_PAUSED && !FOR_ANOTHER(k) -> COMMIT : 0)
       :: what == ROLLBACK ->
          j_held = true; rolled_back = true; served = 0;
          forget_target(k); held[k] = true; fenced[k] = false; phase[k] = IDLE
       :: what == BEGIN -> begin(k)
       :: else
       fi;
       /* What has to be written. It ends when the journal is another's. */
       if
       :: (what == COMMIT || what == COMMIT_WITHOUT || what == ABORT) &&
          term[k] != j_term -> what = STOP
       :: what == ABORT && term[k] == j_term -> j_ended = true; phase[k] = IDLE
       :: what == COMMIT_WITHOUT && term[k] == j_term ->
          write_commit(k); phase[k] = IDLE
       :: what == COMMIT && term[k] == j_term ->
          phase[k] = APPLY;
          if
          :: LEFT(TELL_FIRST) -> commit[k] = j_opened
          :: else -> write_commit(k)
          fi
       :: else
       fi;
       if
       :: what == STOP -> stop(k)
       :: else
       fi;
       if
       :: COMPLETE(k) && term[k] != 0 -> reconcile(k)
       :: else
       fi;
       x = 0; y = 0; z = 0; n = 0; what = 0; was_servable = false
     }
  :: GOOD(k) ->
progress:
     skip
  od
}

/* ---- Faults of nodes and engines ---- */

inline restart_node() {
  /* A hook that runs goes on; nobody hears how it ends. */
  if
  :: n == 0 && engine == RUNS &&
     (to_engine ? [PAUSE, _, _] || to_engine ? [FIRM, _, _]) ->
     engine = LATE_PAUSE
  :: n == 0 && engine == STILL && to_engine ? [RESUME, _, _] ->
     engine = LATE_RESUME; goes()
  :: true
  fi;
  if
  :: n == 0 ->
     drop_engine();
     n_paused = (engine != RUNS); forget_offer()
  :: else
  fi;
  if
  :: n == HOST(0) -> drop_worker(0); answers[0] = 0
  :: else
  fi;
  if
  :: n == HOST(1) -> drop_worker(1); answers[1] = 0
  :: else
  fi;
  fresh[n] = true; rejoin[n] = false;
  n_term[n] = (LEFT(FORGETS_TERM) -> 0 : n_term[n])
}

inline restart_engine() {
  incarnation++;
  engine = RUNS; word[0] = OWN; word[1] = OWN; served = 0;
  becomes[0] = 0; becomes[1] = 0; answers[0] = 0; answers[1] = 0;
  drop_engine(); drop_worker(0); drop_worker(1);
  n_paused = false; forget_offer();
  rejoin[0] = true; rejoin[1] = !one_node
}

proctype faults() {
end:
  do
  :: atomic {
       if
       :: breaks > 0 && link[0] != 0 -> breaks--; n = 0
       :: breaks > 0 && link[1] != 0 -> breaks--; n = 1
       :: crashes > 0 -> crashes--; n = 0; what = STOP
       :: crashes > 0 && !one_node -> crashes--; n = 1; what = STOP
       fi;
       if
       :: what == STOP -> restart_node()
       :: else
       fi;
       cut(n);
       n = 0; what = 0
     }
  :: d_step { crashes > 0 -> crashes--; restart_engine() }
  :: d_step { losses > 0 && nempty(to_engine) -> losses--; to_engine ? _, _, _ }
  :: d_step { losses > 0 && nempty(to_worker[0]) ->
       losses--; to_worker[0] ? _, _ }
  :: d_step { losses > 0 && nempty(to_worker[1]) ->
       losses--; to_worker[1] ? _, _ }
  od
}

init {
  d_step {
    c_code {
      now.updates = FromEnvironment("UPDATES");
      now.crashes = FromEnvironment("CRASHES");
      now.breaks = FromEnvironment("BREAKS");
      now.losses = FromEnvironment("LOSSES");
      now.fails = FromEnvironment("FAILS");
      now.aborts = FromEnvironment("ABORTS");
      now.haste = FromEnvironment("HASTE");
      now.rollbacks = FromEnvironment("ROLLBACKS");
      now.seconds = FromEnvironment("SECONDS");
      now.mutant = FromEnvironment("MUTANT");
      now.one_node = FromEnvironment("ONE_NODE");
    };
  }
  atomic {
    run promises(); run engine_control(); run worker(0); run worker(1);
    run node(0);
    if
    :: !one_node -> run node(1)
    :: else
    fi;
    run coordinator(0);
    if
    :: seconds > 0 -> run coordinator(1)
    :: else
    fi;
    run faults()
  }
}
