/* The commit and recovery protocol, for spin: one replica with two workers, two
 * nodes, a coordinator with its journal, and a second coordinator that has none.
 *
 * What is modelled, and where it lives in the daemon:
 *   coordinator  daemon/coordinator: holds, installs and releases a replica;
 *                COMMIT is in the journal before anybody is told. What it
 *                believes of the replica it has from reports and hellos.
 *   node         daemon/service: forwards commands of the newest term to its
 *                worker, says hello with the words of what it holds. Node 0
 *                leads the replica: it has its control stream. Its small
 *                journal holds the newest term, the cluster and a refusal.
 *   worker       client/cc: INSTALLED(u) -> WRITING(v) -> INSTALLED(v). An
 *                APPLY that it has not begun waits in its queue.
 *   engine       runs or stands still; that is what must never see a mix.
 * Transfers are left out: an update that is offered is verified everywhere.
 *
 * Messages of one link keep their order. A link breaks (what is on it is lost),
 * a single message is lost, a message comes twice, each within a budget. A
 * party dies at any moment, within a budget, and starts again: the coordinator
 * with its journal, a node with its small one, a worker with its word (its
 * stream breaks, and with it what waited in its queue) or, with the whole
 * engine, as a new incarnation. Deadlines pass at any moment.
 *
 * Configurations (run.sh):
 *   -DONE_NODE    both workers on node 0, which may then refuse an offer
 *   -DSTREAM      no second copy: workers write before the commit
 *   -DUPDATES=n -DCRASHES=n -DBREAKS=n -DLOSSES=n -DDOUBLES=n -DSECONDS=n
 *   -DMUTANT_...  one rule left out; each must be found wanting
 */

#ifndef UPDATES
#define UPDATES 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef BREAKS
#define BREAKS 1
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef DOUBLES
#define DOUBLES 0
#endif
#ifndef SECONDS
#define SECONDS 0
#endif
#ifndef ABORTS
#define ABORTS 1
#endif

/* Contents of live memory. 0 is what was there before; 1.. are updates. */
#define FOREIGN 6 /* an update of the second coordinator */
#define WRITING 7

#ifdef ONE_NODE
#define HOST(w) 0
#define NODES 1
#else
#define HOST(w) (w)
#define NODES 2
#endif

mtype = { PAUSE, WRITE, APPLY, RESUME, PAUSED, WROTE, APPLIED, RESUMED, HELLO,
          LEFT };

/* down: what, term, update or content, incarnation, command number
 * up:   what, worker or paused, content of worker 0, of worker 1, incarnation,
 *       command number */
#define ROOM 3
chan down[2] = [ROOM] of { mtype, byte, byte, bit, byte };
chan up[2] = [ROOM] of { mtype, byte, byte, byte, bit, byte };

/* ---- The truth ---- */
byte word[2];       /* live memory of each worker */
bool running = true;
bit incarnation;    /* of the engine */
byte queued[2];     /* an APPLY that the worker has not begun, + 1; 0: none */
bool fresh = false; /* the engine was started again after it had served */

/* ---- Disks ---- */
byte j_term;
byte j_opened;      /* the newest update that was given out */
byte j_commit;      /* the newest that was committed */
byte j_ended;       /* updates up to here have ended */
bool j_aborted[UPDATES + 1];
bool j_stream;      /* STREAM_BEGIN without a COMMIT yet */

byte n_term[2];     /* newest term seen */
byte n_refused;     /* node 0: term of the offer that it gave up, 0: none */

/* ---- Links: to the coordinator, to the second one, or down ---- */
#define DOWN 0
#define UP 1
#define STRANGE 2
byte link[2];
bool coordinator_up;
bool second_up;
bool lost_journal;  /* the second coordinator has met a known cluster */
bool gone[2];       /* it broke, and the coordinator has not noticed */
byte awaiting[2];   /* hellos that are not answered: older commands are dropped */
bool rejoin[2];     /* the node has to say hello again on its link */
byte served;        /* the newest update that the engine ran with */

byte crashes = CRASHES;
byte breaks = BREAKS;
byte losses = LOSSES;
byte doubles = DOUBLES;
byte seconds = SECONDS;
byte aborts = ABORTS;

#define SAME (word[0] == word[1] && word[0] != WRITING)

/* The promise: whenever the engine takes a step. */
#define SERVABLE \
  (SAME && word[0] != FOREIGN && word[0] <= j_commit && \
   (fresh || word[0] >= served))

inline flush(n) {
  do
  :: len(down[n]) > 0 -> down[n] ? _, _, _, _, _
  :: len(down[n]) == 0 && len(up[n]) > 0 -> up[n] ? _, _, _, _, _, _
  :: len(down[n]) == 0 && len(up[n]) == 0 -> break
  od
}

inline cut(n) {
  link[n] = DOWN;
  gone[n] = true;
  rejoin[n] = false;
  awaiting[n] = 0;
  flush(n)
}

/* The engine runs: with what, is looked at by `step`. */
inline go() {
  running = true;
  if
  :: SAME -> served = word[0]
  :: else
  fi
}

/* ------------------------------------------------------------------ */
/* The step that the engine takes with its two workers, at any moment. */

active proctype step() {
end:
  do
  :: atomic { running && !SERVABLE -> assert(false) }
  od
}

/* ------------------------------------------------------------------ */
/* Workers. */

inline worker_takes(w) {
  /* WRITING before the first byte. */
  assert(!running);
  word[w] = WRITING
}

inline tell(k, message, whose, about) {
  if
  :: link[k] == UP && len(up[k]) < ROOM ->
     up[k] ! message, whose, word[0], word[1], incarnation, about
  :: !(link[k] == UP && len(up[k]) < ROOM) /* the next hello says it */
  fi
}

active [2] proctype worker() {
  byte to;
  bit life;
end:
  do
  :: d_step { queued[_pid - 1] != 0 ->
       to = queued[_pid - 1] - 1;
       life = incarnation;
       if
       :: word[_pid - 1] == to -> skip /* it has that: nothing is written */
       :: else -> worker_takes(_pid - 1)
       fi
     }
     d_step {
       /* The last byte. An engine that was started again meanwhile has nothing
        * of this. */
       if
       :: life == incarnation && queued[_pid - 1] == to + 1 ->
          queued[_pid - 1] = 0;
          word[_pid - 1] = to;
          tell(HOST(_pid - 1), APPLIED, _pid - 1, to)
       :: life == incarnation && queued[_pid - 1] != to + 1 ->
          /* Its stream broke: it is done, and the next hello says so. */
          word[_pid - 1] = to;
          tell(HOST(_pid - 1), APPLIED, _pid - 1, to)
       :: else -> skip
       fi;
       to = 0
     }
  od
}

/* ------------------------------------------------------------------ */
/* Nodes. */

/* What a node says of its worker: one that was told to write, and has not begun,
 * may begin any moment. */
#ifdef MUTANT_QUEUE
#define SAID(w) word[w]
#else
#define SAID(w) (queued[w] != 0 -> WRITING : word[w])
#endif

inline hello(n) {
  /* Paused, or not known: then it will be asked to pause again. */
  awaiting[n]++;
  up[n] ! HELLO, !running, SAID(0), SAID(1), incarnation, n_refused
}

#ifdef MUTANT_STALE_TERM
#define CURRENT(n, term) (awaiting[n] == 0)
#else
#define CURRENT(n, term) (awaiting[n] == 0 && term >= n_term[n])
#endif

active [NODES] proctype node() {
  byte term, what, number;
  bit life;
  byte n;
  n = _pid - 3;
end:
  do
  /* Dials. Which coordinator answers is not its choice. */
  :: atomic { link[n] == DOWN && coordinator_up && empty(down[n]) &&
              empty(up[n]) ->
       link[n] = UP;
       n_term[n] = (j_term > n_term[n] -> j_term : n_term[n]);
       hello(n)
     }
#if SECONDS > 0
  :: atomic { link[n] == DOWN && second_up && !lost_journal ->
#ifdef MUTANT_EMPTY_JOURNAL
       link[n] = STRANGE; /* it forgets its cluster, as a new one would */
       n_term[n] = 1
#else
       /* JOURNAL_LOST: its cluster is another, its term is higher. */
       lost_journal = true
#endif
     }
#endif
  :: atomic { link[n] == UP && rejoin[n] && len(up[n]) < ROOM ->
       rejoin[n] = false;
       hello(n)
     }
  :: atomic { down[n] ? PAUSE(term, what, life, number) ->
       if
       :: CURRENT(n, term) && life == incarnation ->
          running = false;
          tell(n, PAUSED, 0, number)
       :: else
       fi
     }
  :: atomic { down[n] ? APPLY(term, what, life, number) ->
       if
       :: CURRENT(n, term) && life == incarnation && term > n_refused ->
          if
          :: queued[number] == 0 -> queued[number] = what + 1
          :: else /* still at the one before */
          fi
       :: else
       fi
     }
#ifdef STREAM
  /* Buckets go from slots into live memory; what comes of them is a mix until
   * the commit. */
  :: atomic { down[n] ? WRITE(term, what, life, number) ->
       if
       :: CURRENT(n, term) && life == incarnation && term > n_refused ->
          worker_takes(number);
          tell(n, WROTE, number, what)
       :: else
       fi
     }
#endif
  :: atomic { down[n] ? RESUME(term, what, life, number) ->
       if
       :: CURRENT(n, term) && life == incarnation ->
          go();
          tell(n, RESUMED, 0, number)
       :: else
       fi
     }
  /* barrier_timeout: the coordinator does not come back, the commit is not
   * known here. Durable before the engine runs. */
#if defined(ONE_NODE) || defined(MUTANT_REFUSAL)
  :: atomic { n == 0 && link[0] == DOWN && !running && n_refused == 0 &&
              queued[0] == 0 &&
#ifndef MUTANT_REFUSAL
              queued[1] == 0 && SAME &&
#else
              word[0] != WRITING &&
#endif
              word[0] < j_opened ->
       n_refused = n_term[0];
       go()
     }
#endif
#ifdef ONE_NODE
  /* Past the commit: all workers agree, the replica goes on by itself. */
  :: atomic { link[0] == DOWN && !running && SAME && queued[0] == 0 &&
              queued[1] == 0 && word[0] != 0 && word[0] == j_commit ->
       go()
     }
#endif
  od
}

/* ------------------------------------------------------------------ */
/* The coordinator. */

#define IDLE 0
#define OFFERED 1   /* holds it for j_opened, not committed */
#define STREAMING 2 /* workers write before the commit */
#define INSTALLING 3
#define RELEASING 4

#define E_RUNNING 0
#define E_PAUSING 1
#define E_PAUSED 2
#define E_RESUMING 3
#define E_DOUBTFUL 4

byte phase;
byte engine;
byte command;       /* of the Pause or Resume in flight */
byte next_command;
byte target;        /* INSTALLING */
byte seen[2];       /* the workers' words */
bool here[2];       /* the node of each worker has said hello */
byte asked[2];      /* APPLY in flight: its update + 1 */
byte wrote;         /* STREAM: bits of the workers that took everything */
bit life;           /* of the engine, as it knows it */
byte life0, life1;

#ifdef ONE_NODE
#define COMPLETE here[0]
#else
#define COMPLETE (here[0] && here[1] && life0 == life1)
#endif
#define AGREE (seen[0] == seen[1] && seen[0] != WRITING)
/* What is sent before it notices is lost. */
#define MAY_SEND(n) (link[n] == UP && !gone[n] && len(down[n]) < ROOM)

inline send_pause() {
  next_command = next_command + 1;
  command = next_command;
  engine = E_PAUSING;
  down[0] ! PAUSE, j_term, j_opened, life, command
}
inline send_resume() {
  next_command = next_command + 1;
  command = next_command;
  engine = E_RESUMING;
  down[0] ! RESUME, j_term, seen[0], life, command
}
inline send_apply(w) {
  asked[w] = target + 1;
  down[HOST(w)] ! APPLY, j_term, target, life, w
}
inline forget() {
  phase = IDLE; engine = E_DOUBTFUL; command = 0; target = 0;
  seen[0] = WRITING; seen[1] = WRITING; here[0] = false; here[1] = false;
  asked[0] = 0; asked[1] = 0; wrote = 0; gone[0] = false; gone[1] = false;
  life = 0; life0 = 0; life1 = 0
}

/* The replica is complete (again): what shall become of it? */
inline settle() {
  if
  :: phase == OFFERED || phase == STREAMING ->
     /* A participant left before the commit: the update is given up. */
     j_aborted[j_opened] = true; j_ended = j_opened; j_stream = false;
     phase = IDLE; target = 0
  :: else
  fi;
  asked[0] = 0; asked[1] = 0; wrote = 0;
  if
  :: AGREE && seen[0] == j_commit -> phase = RELEASING; target = 0
  :: else -> phase = INSTALLING; target = j_commit
  fi
}

inline learn(w, content) {
  seen[w] = content;
  asked[w] = 0
}

inline hear() {
    if
    :: m == HELLO ->
       gone[n] = false;
       awaiting[n]--;
       do
       :: len(down[n]) > 0 -> down[n] ? _, _, _, _, _
       :: len(down[n]) == 0 -> break
       od;
       here[n] = true;
       if
       :: n == 0 ->
          life0 = l; life = l;
          engine = (a -> E_DOUBTFUL : E_RUNNING);
          command = 0;
          learn(0, c0)
       :: else -> life1 = l
       fi;
       if
       :: HOST(1) == n -> learn(1, c1)
       :: else
       fi;
       if
       :: COMPLETE -> settle()
       :: else
       fi
    :: m == PAUSED && engine == E_PAUSING && number == command ->
       engine = E_PAUSED
    :: m == RESUMED && engine == E_RESUMING && number == command ->
       engine = E_RUNNING
    :: m == APPLIED && l == life ->
       /* A worker's own word. */
       if
       :: a == 0 -> learn(0, c0)
       :: else -> learn(1, c1)
       fi
    :: m == WROTE && phase == STREAMING && number == j_opened && l == life ->
       wrote = wrote | (1 << a)
    :: else
    fi;
    m = 0; a = 0; c0 = 0; c1 = 0; number = 0; l = 0; n = 0
}

active proctype coordinator() {
  mtype m;
  byte a, c0, c1, number;
  bit l;
  byte n;
restart:
  atomic {
    forget();
    j_term = j_term + 1;
    next_command = j_term * 16;
    /* Before COMMIT is journalled the update is aborted, after it is rolled
     * forward. */
    if
    :: j_opened > j_ended && j_commit != j_opened ->
       j_aborted[j_opened] = true; j_ended = j_opened; j_stream = false
    :: j_opened > j_ended && j_commit == j_opened -> j_ended = j_opened
    :: else
    fi;
    coordinator_up = true
  }
loop:
  do
  /* ---- Nothing is left to do: only here may a history end ---- */
  :: atomic { phase == IDLE && COMPLETE && engine == E_RUNNING && AGREE &&
              j_opened == UPDATES && running && len(up[0]) == 0 &&
              len(up[1]) == 0 ->
       goto parked
     }
  /* ---- Somebody publishes ---- */
  :: atomic { phase == IDLE && COMPLETE && engine == E_RUNNING && AGREE &&
              j_opened < UPDATES && MAY_SEND(0) ->
       j_opened = j_opened + 1;
       phase = OFFERED;
       send_pause()
     }
  /* ---- The decision ---- */
#ifdef STREAM
  :: atomic { phase == OFFERED && engine == E_PAUSED && COMPLETE &&
              MAY_SEND(HOST(0)) && MAY_SEND(HOST(1)) && len(down[0]) < 2 ->
       j_stream = true;
       phase = STREAMING;
       wrote = 0;
       down[HOST(0)] ! WRITE, j_term, j_opened, life, 0;
       down[HOST(1)] ! WRITE, j_term, j_opened, life, 1
     }
  :: atomic { phase == STREAMING && wrote == 3 ->
#else
  :: atomic { phase == OFFERED && engine == E_PAUSED && COMPLETE ->
#endif
#ifdef MUTANT_TELL_FIRST
       phase = INSTALLING; target = j_opened
     }
  :: atomic { phase == INSTALLING && target > j_commit && asked[0] != 0 &&
              asked[1] != 0 ->
       j_commit = target; j_ended = target; j_stream = false
     }
#else
       j_commit = j_opened; j_ended = j_opened; j_stream = false;
       phase = INSTALLING; target = j_opened
     }
#endif
  /* A deadline passes, a rank or a node is lost: before the commit only. */
  :: atomic { (phase == OFFERED || phase == STREAMING) && aborts > 0 ->
       aborts = aborts - 1;
       j_aborted[j_opened] = true; j_ended = j_opened; j_stream = false;
       wrote = 0;
#ifdef STREAM
       if
       :: phase == STREAMING ->
#ifdef MUTANT_STREAM_ABORT
          phase = RELEASING
#else
          /* They may have begun to write: the old one is put back. */
          seen[0] = WRITING; seen[1] = WRITING;
          phase = INSTALLING; target = j_commit
#endif
       :: else -> phase = RELEASING
       fi
#else
       phase = RELEASING
#endif
     }
#ifdef MUTANT_UNDO
  :: atomic { phase == INSTALLING && target == j_commit && aborts > 0 &&
              !j_aborted[target] && target > 0 ->
       aborts = aborts - 1;
       j_aborted[target] = true;
       phase = RELEASING
     }
#endif
  /* ---- Install on every worker ---- */
  :: atomic { phase == INSTALLING && COMPLETE &&
              (engine == E_RUNNING || engine == E_DOUBTFUL ||
               engine == E_RESUMING) && MAY_SEND(0) ->
       send_pause()
     }
  :: atomic { phase == INSTALLING && COMPLETE && engine == E_PAUSED &&
              seen[0] != target && asked[0] == 0 && MAY_SEND(HOST(0)) ->
       send_apply(0)
     }
  :: atomic { phase == INSTALLING && COMPLETE && engine == E_PAUSED &&
              seen[1] != target && asked[1] == 0 && MAY_SEND(HOST(1)) ->
       send_apply(1)
     }
#ifdef MUTANT_RESUME_EARLY
  :: atomic { phase == INSTALLING && (seen[0] == target || seen[1] == target) ->
#else
  :: atomic { phase == INSTALLING && seen[0] == target && seen[1] == target ->
#endif
       phase = RELEASING
     }
  /* ---- Release: a mix is never resumed ---- */
  :: atomic { phase == RELEASING && COMPLETE &&
              (engine == E_PAUSED || engine == E_DOUBTFUL ||
               engine == E_PAUSING) &&
#ifndef MUTANT_RESUME_EARLY
              AGREE &&
#endif
              MAY_SEND(0) ->
       send_resume()
     }
  :: atomic { phase == RELEASING && COMPLETE && engine == E_RUNNING ->
       phase = IDLE; target = 0
     }
  /* ---- Reports ---- */
  :: atomic { up[0] ? m, a, c0, c1, l, number -> n = 0; hear() }
#ifndef ONE_NODE
  :: atomic { up[1] ? m, a, c0, c1, l, number -> n = 1; hear() }
#endif
  /* Nothing moves any more: a command is given again. */
  :: atomic { timeout && coordinator_up && COMPLETE &&
              (engine == E_PAUSING || engine == E_RESUMING) && link[0] == UP ->
       engine = E_DOUBTFUL
     }
  :: atomic { timeout && phase == INSTALLING && asked[0] != 0 -> asked[0] = 0 }
  :: atomic { timeout && phase == INSTALLING && asked[1] != 0 -> asked[1] = 0 }
  :: atomic { timeout && phase == OFFERED && engine == E_DOUBTFUL ->
       j_aborted[j_opened] = true; j_ended = j_opened; phase = RELEASING
     }
  :: atomic { timeout && phase == STREAMING ->
       j_aborted[j_opened] = true; j_ended = j_opened; j_stream = false;
       seen[0] = WRITING; seen[1] = WRITING; wrote = 0;
       phase = INSTALLING; target = j_commit
     }
  /* ---- A link breaks under it: the node is lost with all it said ---- */
  :: atomic { gone[0] ->
       gone[0] = false; here[0] = false; engine = E_DOUBTFUL;
#ifdef ONE_NODE
       asked[0] = 0; asked[1] = 0
#else
       asked[0] = 0
#endif
     }
#ifndef ONE_NODE
  :: atomic { gone[1] -> gone[1] = false; here[1] = false; asked[1] = 0 }
#endif
  :: atomic { crashes > 0 ->
       crashes = crashes - 1;
       coordinator_up = false;
#ifdef MUTANT_STALE_TERM
       /* What was sent is still delivered by somebody. */
       link[0] = DOWN; link[1] = DOWN
#else
       cut(0); cut(1)
#endif
     }
     goto restart
  od;

parked:
end_parked:
  if
  :: len(up[0]) > 0 || len(up[1]) > 0 || gone[0] || gone[1] ->
     goto loop
  :: atomic { crashes > 0 ->
       crashes = crashes - 1;
       coordinator_up = false;
       cut(0); cut(1)
     }
     goto restart
  fi
}

/* ------------------------------------------------------------------ */
/* The second coordinator: an empty journal, another cluster, term 1. */

#if SECONDS > 0
active proctype second() {
end:
  do
  :: atomic { seconds > 0 && !second_up -> seconds = seconds - 1;
       second_up = true }
#ifdef MUTANT_EMPTY_JOURNAL
  /* It takes the nodes for new ones, and serves an update of its own. */
  :: atomic { link[0] == STRANGE && link[1] == STRANGE && len(down[0]) < ROOM ->
       running = false;
       word[0] = FOREIGN; word[1] = FOREIGN;
       running = true
     }
#endif
  :: atomic { second_up && lost_journal -> second_up = false }
  od
}
#endif

/* ------------------------------------------------------------------ */
/* What happens to links, nodes and engines. */

active proctype world() {
  mtype m;
  byte a, b, c, e;
  bit l;
end:
  do
  :: atomic { breaks > 0 && link[0] == UP -> breaks = breaks - 1; cut(0) }
#ifndef ONE_NODE
  :: atomic { breaks > 0 && link[1] == UP -> breaks = breaks - 1; cut(1) }
#endif
#if LOSSES > 0
  :: atomic { losses > 0 && nempty(down[0]) -> losses = losses - 1;
       down[0] ? _, _, _, _, _ }
  :: atomic { losses > 0 && nempty(up[0]) -> losses = losses - 1;
       up[0] ? _, _, _, _, _, _ }
  :: atomic { losses > 0 && nempty(down[1]) -> losses = losses - 1;
       down[1] ? _, _, _, _, _ }
  :: atomic { losses > 0 && nempty(up[1]) -> losses = losses - 1;
       up[1] ? _, _, _, _, _, _ }
#endif
#if DOUBLES > 0
  :: atomic { doubles > 0 && nempty(down[0]) && len(down[0]) < ROOM ->
       doubles = doubles - 1;
       down[0] ? <m, a, b, l, c>; down[0] ! m, a, b, l, c;
       m = 0; a = 0; b = 0; c = 0; l = 0 }
  :: atomic { doubles > 0 && nempty(up[0]) && len(up[0]) < ROOM ->
       doubles = doubles - 1;
       up[0] ? <m, a, b, c, l, e>; up[0] ! m, a, b, c, l, e;
       m = 0; a = 0; b = 0; c = 0; e = 0; l = 0 }
#endif
  /* A daemon dies: the workers' streams end with it, and what waited. */
  :: atomic { crashes > 0 -> crashes = crashes - 1;
       cut(0);
       queued[0] = 0;
#ifdef ONE_NODE
       queued[1] = 0
#endif
     }
#ifndef ONE_NODE
  :: atomic { crashes > 0 -> crashes = crashes - 1;
       cut(1);
       queued[1] = 0
     }
#endif
  /* A worker's stream breaks: it registers again with its word. */
  :: atomic { crashes > 0 -> crashes = crashes - 1;
       queued[0] = 0; rejoin[HOST(0)] = true }
  :: atomic { crashes > 0 -> crashes = crashes - 1;
       queued[1] = 0; rejoin[HOST(1)] = true }
  /* The engine dies and starts again, with what it loads by itself. */
  :: atomic { crashes > 0 -> crashes = crashes - 1;
       incarnation = 1 - incarnation;
       word[0] = 0; word[1] = 0; queued[0] = 0; queued[1] = 0;
       running = true; fresh = true;
       rejoin[0] = true;
#ifndef ONE_NODE
       rejoin[1] = true
#endif
     }
  od
}
