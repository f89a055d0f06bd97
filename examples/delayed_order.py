"""Runs graphed callables in an order that delays weight gradients. The order uses the signed numbers of Transformer Engine.

python examples/delayed_order.py
"""

import jax
import jax.numpy as jnp

import jgraph


def stage(params, x):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def loss(y):
    return jnp.mean(y**2)


params = tuple({"up": jnp.full((64, 256), 0.02), "down": jnp.full((256, 64), 0.02)} for _ in range(2))
x = jnp.ones((8, 64))
# Per microbatch: both forwards (1, 2), both dgrads (-2, -1), then both wgrads (-2.5, -1.5).
order = [1, 2, -2, -1, -2.5, -1.5] * 4
graphed = jgraph.make_graphed_callables((stage,) * 2, params, ((x,),) * 2, order=order, delay_wgrad=True)
run = graphed.run(None, [x] * 4, loss)
print("losses:", [float(value) for value in run.losses])
print("gradients:", jax.tree.map(lambda g: f"{g.dtype}{list(g.shape)}", run.grads))

try:  # invalid: a wgrad before its dgrad
    jgraph.make_graphed_callables((stage,), params[:1], ((x,),), order=[1, -1.5, -1], delay_wgrad=True)
except jgraph.OrderError as error:
    print("rejected:", error)
