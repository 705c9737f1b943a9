"""Stages of training, by the clock or by steps: compiled on a GPU, and back to a snapshot where a loss blows up.

On a GPU blocks and losses are compiled (`hasten`, `Fast`) and matrix products are of bfloat16 (`products`); scores,
variances, denominators and penalties stay float32. What is compiled is compared with what is not before a stage begins
(`check`); where it fails or says something else, training goes on without. `STUDENTS_COMPILE=1` compiles on a CPU.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import time

import torch

LOOK, SNAPSHOT, SAY = 10, 200, 15.0  # steps between looks at the losses and between snapshots; seconds between lines
WILD, MOST_RETURNS = 20.0, 6  # of the running median; after so many returns a stage ends
WARM = 3  # steps before the clock starts


def say(**words):
    print(json.dumps(words), flush=True)


# ---- compiled --------------------------------------------------------------------------------------------------------


class Fast:
    """A function that is compiled while `Fast.on`."""

    on = torch.cuda.is_available() or os.environ.get("STUDENTS_COMPILE") == "1"

    def __init__(self, plain):
        self.plain, self.fast = plain, torch.compile(plain, dynamic=False)

    def __call__(self, *args, **named):
        return (self.fast if Fast.on else self.plain)(*args, **named)


def hasten(*models):
    """Compile the blocks of models, where that is on; a copy of a model is plain again."""
    if Fast.on:
        torch._dynamo.config.recompile_limit = 64
        for model in models:
            for block in model.blocks:
                block.compile(dynamic=False)


def slow_down(*models):
    """Take back what is compiled, everywhere."""
    Fast.on = False
    for model in models:
        for block in model.blocks:
            block._compiled_call_impl = None


def products(x):
    """Matrix products of bfloat16 on a GPU."""
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda)


def check(name, model, others, loss_of):
    """Compare a compiled loss and its gradient with plain ones, on one batch; without compiling where they differ.

    `loss_of(model, *others)` → a loss, the same at every call.
    """
    if not Fast.on:
        return

    def found(models):
        loss = first(loss_of(*models))
        model = models[0]
        model.zero_grad()
        loss.backward()
        slope = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        model.zero_grad()
        return float(loss.detach()), slope

    began = time.monotonic()
    try:
        fast, fast_slope = found((model, *others))
    except Exception as e:  # whatever a compiler may say
        say(stage=name, compiling=f"failed: {type(e).__name__}: {str(e)[:400]}")
        slow_down(model, *others)
        return
    Fast.on = False
    plain, slope = found(tuple(copy.deepcopy(m) for m in (model, *others)))
    Fast.on = True
    cosine = float(torch.dot(fast_slope, slope) / (fast_slope.norm() * slope.norm()).clamp_min(1e-30))
    same = abs(fast - plain) <= 0.1 * abs(plain) + 1e-3 and cosine > 0.2  # a largest score may be another one's
    took = round(time.monotonic() - began, 1)
    say(stage=name, compiled=round(fast, 4), plain=round(plain, 4), cosine=round(cosine, 4), seconds=took)
    if not same:
        say(stage=name, compiling="given up: it says something else")
        slow_down(model, *others)


def first(loss):
    return loss[0] if isinstance(loss, tuple) else loss


# ---- a stage ---------------------------------------------------------------------------------------------------------


def by_the_clock(name, model, rate, seconds, step, decay=0.0, steps=None, until=math.inf):
    """AdamW, rate up over 100 steps and down with a cosine over the seconds, or over the steps where they are given.

    `step()` gives a loss, or a loss and the part of it that leaves the intervals. No later than `until` (monotonic).
    The clock starts after the first steps, in which things are compiled. Returns how many steps were made.
    """
    watch = Watch(name, model, rate, decay)
    done, since, began = 0, 0, time.monotonic()
    while True:
        if done in (0, WARM):
            watch.wait()
            began = time.monotonic()
        now = time.monotonic()
        share = max((now - began) / max(seconds, 1e-3), done / steps if steps else 0.0)
        if done and (share >= 1 or now >= until):
            break
        since += 1
        lift = min(1.0, since / 100)
        watch.set_rate(lift * max(0.01, 0.5 + 0.5 * math.cos(math.pi * min(1.0, share))))
        watch.update(step())
        done += 1
        if done % LOOK == 0 and not watch.sane(done, share):
            since = 0
            if watch.returns > MOST_RETURNS:
                say(stage=name, given_up=f"after {MOST_RETURNS} returns")
                break
    watch.end(done)
    return done


class Watch:
    """A model, its optimizer, and two snapshots of it from while the loss was sane."""

    def __init__(self, name, model, rate, decay):
        self.name, self.model, self.rate, self.decay = name, model, rate, decay
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.on_gpu = self.weights[0].is_cuda
        self.kept = [self.snapshot()] * 2  # the older one is gone back to
        self.recent, self.medians, self.within, self.returns = [], [], 0.0, 0
        self.began = self.said = time.monotonic()
        self.restart()

    def snapshot(self):
        return [p.detach().clone() for p in self.weights]

    def restart(self):
        self.optimizer = torch.optim.AdamW(self.weights, lr=self.rate, weight_decay=self.decay, fused=self.on_gpu)

    def set_rate(self, share):
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * share

    def update(self, loss):
        parts = loss if isinstance(loss, tuple) else (loss, torch.zeros_like(loss))
        self.optimizer.zero_grad()
        parts[0].backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.recent.append(torch.stack([p.detach().float() for p in parts]))

    def wait(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def sane(self, done, share):
        """Look at the last losses; go back where they are wild."""
        losses, within = torch.stack(self.recent).cpu().T.tolist()
        self.recent = []
        now = statistics.median(losses)
        usual = statistics.median(self.medians[-100:]) if self.medians else math.inf
        if not all(map(math.isfinite, losses)) or now > WILD * usual:
            self.go_back(done, now, usual)
            return False
        self.medians.append(now)
        self.within = statistics.median(within)
        if done % SNAPSHOT == 0 and now < 3 * usual:
            self.kept = [self.kept[1], self.snapshot()]
        if time.monotonic() - self.said > SAY:
            self.said = time.monotonic()
            pace = done / (self.said - self.began)
            say(stage=self.name, steps=done, share=round(share, 3), a_second=round(pace, 1), loss=round(now, 4),
                within=round(self.within, 4), worst=round(max(losses), 4))  # fmt: skip
        return True

    def go_back(self, done, now, usual):
        with torch.no_grad():
            for p, v in zip(self.weights, self.kept[0], strict=True):
                p.copy_(v)
        self.kept[1] = self.kept[0]
        self.rate, self.returns, self.medians = self.rate / 2, self.returns + 1, self.medians[-10:]
        self.restart()
        say(stage=self.name, steps=done, blown_up=repr(now), usual=repr(usual), rate_now=self.rate)

    def end(self, done):
        self.wait()
        if self.recent:
            losses, within = torch.stack(self.recent).cpu().T.tolist()
            if not all(map(math.isfinite, losses)):
                self.go_back(done, math.nan, math.nan)
            else:
                self.medians.append(statistics.median(losses))
                self.within = statistics.median(within)
        seconds = time.monotonic() - self.began
        loss = self.medians[-1] if self.medians else math.nan
        say(stage=self.name, steps=done, seconds=round(seconds, 1), a_second=round(done / seconds, 1),
            loss=round(loss, 4), within=round(self.within, 4))  # fmt: skip
