"""REINFORCE on a tiny policy: a trainer with a real optimizer, and two replicas that play with its weights.

The task: the state is one of eight, the right action a permutation of it; the reward says whether the
action was right. Each replica is a process with its own copy of the policy; after each step the trainer
publishes, and each batch of experience says which version it was played with. Printed per step: the
reward, how long publishing kept the trainer from its work, and how long each replica stood still.

  weightsyncd & python reinforce.py [ADDRESS]
"""

import queue
import sys

import torch
import torch.multiprocessing
import weightsync

STATES, STEPS, BATCH = 8, 30, 256
RIGHT = torch.randperm(STATES, generator=torch.Generator().manual_seed(3))


def make_policy():
    return torch.nn.Sequential(torch.nn.Embedding(STATES, 16), torch.nn.Tanh(), torch.nn.Linear(16, STATES))


def play(name, address, experience, stop):
    """A replica: plays for as long as it is not paused."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(map(ord, name)))
    policy = make_policy()
    gate = weightsync.Gate()
    worker = weightsync.Worker(
        "policy", name, policy, address=address, on_pause=gate.pause, on_resume=gate.resume
    )
    with worker:
        worker.wait_registered()
        experience.put((name, 0, None, None, None))
        while not stop.is_set():
            with gate, torch.no_grad():  # a batch is played with one version
                states = torch.randint(STATES, (BATCH,))
                actions = torch.distributions.Categorical(logits=policy(states)).sample()
                played = gate.version
            reward = (actions == RIGHT[states]).float()
            try:
                experience.put((name, played, states.numpy(), actions.numpy(), reward.numpy()), timeout=0.1)
            except queue.Full:  # the trainer is slower
                pass


def pauses_of(admin, result):
    """How long each replica stood still for a version, in milliseconds."""
    found = admin.call("GetVersion", name=result.version_name)
    return {
        times.replica.rpartition("/")[2]: (
            times.resumed_time.ToMilliseconds() - times.pause_request_time.ToMilliseconds()
        )
        for times in found.replicas
    }


def main(address=None):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    experience, stop = context.Queue(4), context.Event()
    names = ["replica-0", "replica-1"]
    players = [context.Process(target=play, args=(name, address, experience, stop)) for name in names]
    for player in players:
        player.start()
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    try:
        with weightsync.Trainer("policy", address=address) as trainer, weightsync.Admin(address) as admin:
            trainer.register(policy)
            there = set()
            while len(there) < len(players):
                there.add(experience.get(timeout=120)[0])
            for step in range(1, STEPS + 1):
                update = trainer.publish(step=step)
                result = update.wait()
                # On-policy: what was played with older weights is left out.
                fresh = None
                while fresh is None:
                    name, version, states, actions, reward = experience.get(timeout=60)
                    if version == result.version:
                        fresh = [torch.from_numpy(part) for part in (states, actions, reward)]
                states, actions, reward = fresh
                chosen = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
                loss = -(chosen * (reward - reward.mean())).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                pauses = ", ".join(f"{n} {ms} ms" for n, ms in sorted(pauses_of(admin, result).items()))
                print(
                    f"step {step:2}: reward {reward.mean():.2f} of {name}, trainer stall "
                    f"{result.stall_seconds * 1e3:.1f} ms, paused: {pauses}",
                    flush=True,
                )
    finally:
        stop.set()
        for player in players:
            player.join(10)
            player.kill()
    return float(reward.mean())


if __name__ == "__main__":
    last = main(*sys.argv[1:])
    print(f"reward {last:.2f} of the last step; by chance it is {1 / STATES:.2f}")
