"""Models of packages around jax: graphs, probabilities, equations, physics, reinforcement learning, quantisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.catalogue import DATA, PIPE_1, PIPE_2, SHARD, ZERO_3, Training, model
from benchmarks.models.common import (
    N_EXAMPLES,
    apply_tower,
    batches,
    cross_entropy,
    floats,
    images,
    integers,
    minimise,
    minimise_noisy,
    next_token_loss,
    regression,
    tokens,
    towers,
)

KEY = jax.random.key


# ---- graphs and point sets ------------------------------------------------------------------------------------------


def _graphs(n_nodes: int = 6, n_edges: int = 10) -> list[Any]:
    """One graph for each example."""
    return batches(
        lambda s: {
            "nodes": floats(N_EXAMPLES, n_nodes, 4, seed=s),
            "senders": integers(n_nodes, N_EXAMPLES, n_edges, seed=s + 1),
            "receivers": integers(n_nodes, N_EXAMPLES, n_edges, seed=s + 2),
            "y": integers(3, N_EXAMPLES, seed=s + 3),
        }
    )


@model("jraph optax", "graph attention, graphs joined into one", "adam")
def graph_network() -> Training:
    import jraph

    def loss(params: Any, batch: Any) -> jax.Array:
        b, n, d = batch["nodes"].shape
        first = (jnp.arange(b) * n)[:, None]
        graph = jraph.GraphsTuple(
            nodes=batch["nodes"].reshape(b * n, d),
            edges=jnp.ones((batch["senders"].size, 1)),
            senders=(batch["senders"] + first).reshape(-1),
            receivers=(batch["receivers"] + first).reshape(-1),
            globals=jnp.zeros((b, 1)),
            n_node=jnp.full(b, n),
            n_edge=jnp.full(b, batch["senders"].shape[1]),
        )
        for layer in params["layers"]:

            def attention(edges: Any, sent: Any, received: Any, _: Any, layer: Any = layer) -> Any:
                return apply_tower(layer["logit"], jnp.concatenate([sent, received], -1))

            graph = jraph.GraphNetGAT(
                update_edge_fn=lambda e, s, r, g, layer=layer: apply_tower(layer["edge"], s),
                update_node_fn=lambda n, s, r, g, layer=layer: apply_tower(layer["node"], jnp.concatenate([n, r], -1)),
                attention_logit_fn=attention,
                attention_reduce_fn=lambda edges, weights: edges * weights,
            )(graph)
        of_graph = jnp.repeat(jnp.arange(b), n, total_repeat_length=b * n)
        return cross_entropy(apply_tower(params["out"], jraph.segment_mean(graph.nodes, of_graph, b)), batch["y"])

    def layer(seed: int) -> Any:
        return {
            "logit": towers(8, 1, seed=seed),
            "edge": towers(4, 4, seed=seed + 1),
            "node": towers(8, 4, seed=seed + 2),
        }

    return minimise(loss, {"layers": [layer(1), layer(5)], "out": towers(4, 3)}, optax.adam(1e-2), _graphs())


@model("jraph optax", "graph convolutions, one graph vmapped over the examples", "adam")
def graph_vmapped() -> Training:
    import jraph

    def one(params: Any, graph: Any) -> jax.Array:
        found = jraph.GraphsTuple(
            nodes=graph["nodes"], edges=None, senders=graph["senders"], receivers=graph["receivers"], globals=None,
            n_node=jnp.array([6]), n_edge=jnp.array([10]),
        )  # fmt: skip
        for layer in params["layers"]:
            found = jraph.GraphConvolution(lambda n, layer=layer: jnp.tanh(apply_tower(layer, n)), add_self_edges=True)(
                found
            )
        return apply_tower(params["out"], found.nodes.max(0))

    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(jax.vmap(one, (None, 0))(params, batch), batch["y"])

    params = {"layers": [towers(4, 8, seed=1), towers(8, 8, seed=2)], "out": towers(8, 3)}
    return minimise(loss, params, optax.adam(1e-2), _graphs())


@model("e3nn-jax optax", "equivariant messages: tensor products, spherical harmonics", "adam")
def equivariant() -> Training:
    import e3nn_jax as e3nn
    import haiku as hk

    def net(points: Any) -> Any:
        vectors = points[:, None] - points[None]
        mask = ~jnp.eye(points.shape[0], dtype=bool)[..., None]
        sh = e3nn.spherical_harmonics([0, 1, 2], e3nn.IrrepsArray("1o", jnp.where(mask, vectors, 1.0)), True)
        radial = e3nn.bessel(jnp.sqrt(jnp.sum(jnp.where(mask, vectors, 1.0) ** 2, -1)), 4, 3.0)
        x = e3nn.haiku.Linear("4x0e + 2x1o + 2x2e")(sh)
        x = x * hk.nets.MLP([8, x.irreps.num_irreps], activation=jax.nn.silu)(radial)
        x = e3nn.sum(x, axis=1)
        x = e3nn.haiku.Linear("4x0e + 2x1o")(e3nn.tensor_square(x))
        return e3nn.haiku.Linear("0e")(x).array.sum()

    found = hk.without_apply_rng(hk.transform(net))
    data = batches(lambda s: {"x": floats(N_EXAMPLES, 5, 3, seed=s), "y": floats(N_EXAMPLES, seed=s + 1)})
    params = found.init(KEY(0), data[0]["x"][0])

    def loss(params: Any, batch: Any) -> jax.Array:
        energies, forces = jax.vmap(jax.value_and_grad(lambda x: found.apply(params, x)))(batch["x"])
        return jnp.mean((energies - batch["y"]) ** 2) + jnp.mean(forces**2)

    return minimise(loss, params, optax.adam(1e-3), data)


@model("jax-md optax", "Behler-Parrinello-like energy with pair potentials, forces", "adam")
def molecules() -> Training:
    from jax_md import energy, space

    displacement, _ = space.periodic(3.0)

    def loss(params: Any, batch: Any) -> jax.Array:
        potential = energy.soft_sphere_pair(displacement, sigma=params["sigma"], epsilon=params["epsilon"])
        morse = energy.morse_pair(displacement, alpha=params["alpha"])

        def total(x: Any) -> Any:
            return potential(x) + morse(x)

        energies, forces = jax.vmap(jax.value_and_grad(total))(batch["x"])
        return jnp.mean((energies - batch["y"]) ** 2) + jnp.mean(forces**2)

    data = batches(lambda s: {"x": floats(N_EXAMPLES, 6, 3, seed=s) % 3, "y": floats(N_EXAMPLES, seed=s + 1)})
    return minimise(
        loss,
        {"sigma": jnp.float32(1.0), "epsilon": jnp.float32(0.5), "alpha": jnp.float32(2.0)},
        optax.adam(1e-2),
        data,
    )


# ---- probabilities --------------------------------------------------------------------------------------------------


@model("distrax optax", "RealNVP: masked couplings, negative log likelihood", "adam")
def real_nvp() -> Training:
    import distrax

    def loss(params: Any, batch: Any) -> jax.Array:
        layers = []
        for i, layer in enumerate(params):

            def conditioner(x: Any, layer: Any = layer) -> Any:
                return jnp.split(apply_tower(layer, x), 2, -1)

            layers.append(
                distrax.MaskedCoupling(
                    mask=jnp.arange(6) % 2 == i % 2,
                    bijector=lambda p: distrax.ScalarAffine(shift=p[0], log_scale=jnp.tanh(p[1])),
                    conditioner=conditioner,
                )
            )
        base = distrax.MultivariateNormalDiag(jnp.zeros(6), jnp.ones(6))
        return -distrax.Transformed(base, distrax.Chain(layers)).log_prob(batch["x"]).mean()

    return minimise(loss, [towers(6, 16, 12, seed=i) for i in (1, 4)], optax.adam(1e-3), regression(6, 1))


@model("flowjax equinox optax", "masked autoregressive flow with splines", "adam")
def spline_flow() -> Training:
    import equinox as eqx
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from paramax import NonTrainable, unwrap

    flow = masked_autoregressive_flow(
        KEY(0), base_dist=Normal(jnp.zeros(4)), transformer=RationalQuadraticSpline(knots=4, interval=3), flow_layers=2,
        nn_width=16,
    )  # fmt: skip
    params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, NonTrainable))

    def loss(params: Any, batch: Any) -> jax.Array:
        return -unwrap(eqx.combine(params, static)).log_prob(batch["x"]).mean()

    return minimise(loss, params, optax.adam(1e-3), regression(4, 1))


@model("numpyro optax", "Bayesian regression by SVI, a plate over the examples", "optax_to_numpyro(adam)")
def variational() -> Training:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def net(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros((5, 2)), 1.0).to_event(2))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("examples", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, scale).to_event(1), obs=y)

    svi = SVI(net, AutoNormal(net), optax.adam(1e-2), Trace_ELBO())
    data = regression(5, 2)
    state = svi.init(jax.random.PRNGKey(0), data[0]["x"], data[0]["y"])

    def step(state: Any, batch: Any) -> Any:
        state, loss = svi.update(state, batch["x"], batch["y"])
        return state, loss

    return Training(step=step, state=state, batches=data)


@model("dynamax optax", "hidden Markov model by forward filtering, sequences vmapped", "adam")
def hidden_markov() -> Training:
    from dynamax.hidden_markov_model import hmm_filter

    def loss(params: Any, batch: Any) -> jax.Array:
        start, moves = jax.nn.softmax(params["start"]), jax.nn.softmax(params["moves"], -1)

        def one(x: Any) -> jax.Array:
            likelihoods = -0.5 * jnp.sum((x[:, None] - params["means"]) ** 2, -1)
            return hmm_filter(start, moves, likelihoods).marginal_loglik

        return -jax.vmap(one)(batch["x"]).mean()

    params = {"start": jnp.zeros(3), "moves": jnp.asarray(floats(3, 3)), "means": jnp.asarray(floats(3, 2, seed=1))}
    return minimise(loss, params, optax.adam(1e-2), batches(lambda s: {"x": floats(N_EXAMPLES, 12, 2, seed=s)}))


@model("tinygp optax", "Gaussian process, marginal likelihood of a task vmapped over tasks", "adam")
def gaussian_process() -> Training:
    import tinygp

    def loss(params: Any, batch: Any) -> jax.Array:
        kernel = jnp.exp(params["size"]) * tinygp.kernels.Matern52(jnp.exp(params["length"]))

        def one(x: Any, y: Any) -> jax.Array:
            return tinygp.GaussianProcess(kernel, x, diag=0.1 + jnp.exp(params["noise"])).log_probability(y)

        return -jax.vmap(one)(batch["x"], batch["y"]).mean()

    data = batches(lambda s: {"x": jnp.sort(floats(N_EXAMPLES, 7, seed=s)), "y": floats(N_EXAMPLES, 7, seed=s + 1)})
    params = {"size": jnp.float32(0.0), "length": jnp.float32(0.1), "noise": jnp.float32(-1.0)}
    return minimise(loss, params, optax.adam(1e-2), data)


@model("ott-jax optax", "Sinkhorn divergence between clouds of points", "adam")
def sinkhorn() -> Training:
    from ott.geometry import pointcloud
    from ott.tools import sinkhorn_divergence

    def loss(params: Any, batch: Any) -> jax.Array:
        def one(x: Any, y: Any) -> jax.Array:
            cost, _ = sinkhorn_divergence.sinkhorn_divergence(
                pointcloud.PointCloud, apply_tower(params, x), y, epsilon=0.5,
                sinkhorn_kwargs={"max_iterations": 20, "min_iterations": 20},
            )  # fmt: skip
            return cost

        return jax.vmap(one)(batch["x"], batch["y"]).mean()

    data = batches(lambda s: {"x": floats(N_EXAMPLES, 6, 3, seed=s), "y": floats(N_EXAMPLES, 6, 2, seed=s + 1)})
    return minimise(loss, towers(3, 16, 2), optax.adam(1e-2), data)


# ---- equations inside models ----------------------------------------------------------------------------------------


@model("jaxopt optax", "deep equilibrium: a fixed point with an implicit derivative", "adam")
def equilibrium() -> Training:
    import jaxopt

    def inner(z: Any, params: Any, x: Any) -> Any:
        return jnp.tanh(0.3 * apply_tower(params["inner"], z) + x)

    solver = jaxopt.AndersonAcceleration(inner, history_size=3, maxiter=8, implicit_diff=True)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = apply_tower(params["in"], batch["x"])
        z = jax.vmap(lambda x: solver.run(jnp.zeros(8), params, x).params)(x)
        return jnp.mean((apply_tower(params["out"], z) - batch["y"]) ** 2)

    params = {"in": towers(6, 8), "inner": towers(8, 8, seed=3), "out": towers(8, 3, seed=5)}
    return minimise(loss, params, optax.adam(1e-2), regression(6, 3))


@model("optimistix optax", "least squares inside the loss, implicit derivative", "adam")
def inner_least_squares() -> Training:
    import optimistix as optx

    def loss(params: Any, batch: Any) -> jax.Array:
        features = apply_tower(params, batch["x"])

        def one(f: Any, y: Any) -> jax.Array:
            found = optx.least_squares(
                lambda z, _: jnp.concatenate([f * z - y, 0.1 * z]), optx.LevenbergMarquardt(1e-3, 1e-3), y,
                max_steps=16, throw=False,
            )  # fmt: skip
            return jnp.mean((found.value - 1.0) ** 2)

        return jax.vmap(one)(features, batch["y"]).mean()

    return minimise(loss, towers(6, 16, 3), optax.adam(1e-2), regression(6, 3))


@model("lineax optax", "linear solves by conjugate gradients in the loss", "adam")
def linear_solves() -> Training:
    import lineax

    def loss(params: Any, batch: Any) -> jax.Array:
        def one(x: Any, y: Any) -> Any:
            root = apply_tower(params, x).reshape(3, 3)
            matrix = lineax.MatrixLinearOperator(root @ root.T + jnp.eye(3), lineax.positive_semidefinite_tag)
            return lineax.linear_solve(matrix, y, lineax.CG(1e-5, 1e-5, max_steps=8), throw=False).value

        return jnp.mean(jax.vmap(one)(batch["x"], batch["y"]) ** 2)

    return minimise(loss, towers(6, 16, 9), optax.adam(1e-2), regression(6, 3))


@model("jax optax", "Fourier neural operator", "adamw")
def neural_operator() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = apply_tower(params["in"], batch["x"][..., None])
        for layer in params["layers"]:
            spectrum = jnp.fft.rfft(x, axis=1)[:, :5]
            mixed = jnp.einsum("bki,kio->bko", spectrum, layer["re"] + 1j * layer["im"])
            x = jax.nn.gelu(jnp.fft.irfft(mixed, x.shape[1], axis=1) + apply_tower(layer["skip"], x))
        return jnp.mean((apply_tower(params["out"], x)[..., 0] - batch["y"]) ** 2)

    def layer(s: int) -> Any:
        weights = {k: jnp.asarray(floats(5, 8, 8, seed=s + i)) * 0.1 for i, k in enumerate(("re", "im"))}
        return weights | {"skip": towers(8, 8, seed=s)}

    params = {"in": towers(1, 8), "layers": [layer(2), layer(6)], "out": towers(8, 1, seed=9)}
    return minimise(loss, params, optax.adamw(1e-2), regression(16, 16))


@model("signax equinox optax", "signatures of paths", "adam")
def signatures() -> Training:
    import signax

    def loss(params: Any, batch: Any) -> jax.Array:
        paths = apply_tower(params["in"], batch["x"])
        found = jax.vmap(lambda path: signax.signature(path, 3))(paths)
        return cross_entropy(apply_tower(params["out"], found), batch["y"])

    data = batches(lambda s: {"x": floats(N_EXAMPLES, 8, 3, seed=s), "y": integers(3, N_EXAMPLES, seed=s + 1)})
    return minimise(loss, {"in": towers(3, 2), "out": towers(14, 3, seed=3)}, optax.adam(1e-2), data)


@model("jaxley optax", "multi-compartment neurons, a scan over time", "adam")
def neurons() -> Training:
    import jaxley as jx
    from jaxley.channels import HH

    compartment = jx.Compartment()
    branch = jx.Branch(compartment, 2)
    cell = jx.Cell(branch, parents=[-1, 0])
    cell.insert(HH())
    cell.branch(0).loc(0.0).record("v", verbose=False)
    cell.branch("all").make_trainable("HH_gNa", verbose=False)
    params = cell.get_parameters()

    def loss(params: Any, batch: Any) -> jax.Array:
        def one(current: Any) -> Any:
            stimuli = cell.branch(0).loc(0.0).data_stimulate(current)
            return jx.integrate(cell, params=params, data_stimuli=stimuli, delta_t=0.1)[0, -1]

        return jnp.mean((jax.vmap(one)(batch["x"]) + 60 - batch["y"]) ** 2)

    return minimise(
        loss,
        params,
        optax.adam(1e-3),
        batches(lambda s: {"x": 0.1 + 0.0 * floats(N_EXAMPLES, 12, seed=s), "y": floats(N_EXAMPLES, seed=s)}),
    )


# ---- reinforcement learning -----------------------------------------------------------------------------------------


@model("rlax optax", "IMPALA: V-trace, policy gradients, entropy", "rmsprop")
def impala() -> Training:
    import rlax

    def loss(params: Any, batch: Any) -> jax.Array:
        logits, values = apply_tower(params["actor"], batch["x"]), apply_tower(params["critic"], batch["x"])[..., 0]

        def one(logits: Any, values: Any, b: Any) -> jax.Array:
            rho = rlax.categorical_importance_sampling_ratios(logits[:-1], b["logits"], b["action"])
            found = rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], b["reward"], b["discount"], rho)
            policy = rlax.policy_gradient_loss(logits[:-1], b["action"], found.pg_advantage, jnp.ones_like(rho))
            entropy = rlax.entropy_loss(logits[:-1], jnp.ones_like(rho))
            return policy + 0.5 * jnp.mean(found.errors**2) + 0.01 * entropy

        return jax.vmap(one)(logits, values, batch).mean()

    def batch(s: int) -> Any:
        return {
            "x": floats(N_EXAMPLES, 7, 5, seed=s),
            "logits": floats(N_EXAMPLES, 6, 3, seed=s + 1),
            "action": integers(3, N_EXAMPLES, 6, seed=s + 2),
            "reward": floats(N_EXAMPLES, 6, seed=s + 3),
            "discount": 0.9 + 0.0 * floats(N_EXAMPLES, 6),
        }

    params = {"actor": towers(5, 16, 3), "critic": towers(5, 16, 1, seed=4)}
    return minimise(loss, params, optax.rmsprop(1e-3), batches(batch))


@model("rlax optax", "distributional Q-learning (C51), soft actor-critic losses", "adam")
def distributional() -> Training:
    import rlax

    atoms = jnp.linspace(-2.0, 2.0, 11)

    def loss(params: Any, batch: Any) -> jax.Array:
        def one(b: Any) -> jax.Array:
            now, later = (apply_tower(params, b[k]).reshape(3, 11) for k in ("x", "next"))
            q = jnp.sum(jax.nn.softmax(later) * atoms, -1)
            return rlax.categorical_double_q_learning(atoms, now, b["action"], b["reward"], 0.9, atoms, later, q)

        return jax.vmap(one)(batch).mean()

    def batch(s: int) -> Any:
        shapes = {"x": (5,), "next": (5,), "reward": ()}
        found = {k: floats(N_EXAMPLES, *shape, seed=s + i) for i, (k, shape) in enumerate(shapes.items())}
        return found | {"action": integers(3, N_EXAMPLES, seed=s + 7)}

    return minimise(loss, towers(5, 16, 33), optax.adam(1e-3), batches(batch))


@model("mctx optax", "policy improved by a tree search (MuZero)", "adam", (SHARD, DATA, PIPE_2))
def tree_search() -> Training:
    import mctx

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        def predicted(state: Any) -> Any:
            out = apply_tower(params["predict"], state)
            return out[:, :3], out[:, 3]

        def recurrent(_: Any, __: Any, action: Any, state: Any) -> Any:
            state = jnp.tanh(apply_tower(params["move"], jnp.concatenate([state, jax.nn.one_hot(action, 3)], -1)))
            logits, value = predicted(state)
            return mctx.RecurrentFnOutput(value * 0.1, jnp.full_like(value, 0.9), logits, value), state

        state = jnp.tanh(apply_tower(params["see"], batch["x"]))
        logits, value = predicted(state)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        found = mctx.gumbel_muzero_policy(None, key, jax.lax.stop_gradient(root), recurrent, num_simulations=4)
        target = jax.lax.stop_gradient(found.action_weights)
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), -1)) + jnp.mean((value - batch["y"][:, 0]) ** 2)

    params = {"see": towers(5, 8), "move": towers(11, 8, seed=2), "predict": towers(8, 8, 4, seed=4)}
    return minimise_noisy(loss, params, optax.adam(1e-3), regression(5, 1))


# ---- other ways to write networks -----------------------------------------------------------------------------------


@model("penzai optax", "transformer of named axes", "adam", (SHARD, ZERO_3, PIPE_2))
def penzai_transformer() -> Training:
    import penzai.pz as pz
    from penzai.models.transformer.variants import llamalike_common as llama

    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=1, query_head_multiplier=2, embedding_dim=16, projection_dim=8, mlp_hidden_dim=32,
        num_decoder_blocks=2, vocab_size=32, mlp_variant="geglu_approx", tie_embedder_and_logits=True,
        parameter_dtype=jnp.float32, activation_dtype=jnp.float32,
    )  # fmt: skip
    net = llama.build_llamalike_transformer(config, KEY(0))
    # Frozen parameters are pytrees of values in place of variables.
    unbound, params = pz.unbind_params(net, freeze=True)

    def loss(params: Any, batch: Any) -> jax.Array:
        ids = pz.nx.wrap(batch["ids"]).tag("batch", "seq")
        positions = pz.nx.wrap(jnp.arange(batch["ids"].shape[1])).tag("seq")
        logits = pz.bind_variables(unbound, params)(ids, token_positions=positions)
        return next_token_loss(logits.unwrap("batch", "seq", "vocabulary"), batch["ids"])

    return minimise(loss, params, optax.adam(1e-3), tokens(32, 10))


@model("haliax equinox optax", "MLP and attention of named axes", "adam", (SHARD, ZERO_3, PIPE_2))
def haliax_network() -> Training:
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn

    batch_axis, place, embed, words = (hax.Axis(n, s) for n, s in (("b", N_EXAMPLES), ("t", 10), ("d", 16), ("w", 32)))
    one, other, third = jax.random.split(KEY(0), 3)
    net = {
        "embed": hnn.Embedding.init(words, embed, key=one),
        "mlp": hnn.MLP.init(embed, embed, 32, 2, key=other),
        "norm": hnn.LayerNorm.init(embed),
        "out": hnn.Linear.init(embed, words, key=third),
    }
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> jax.Array:
        net = eqx.combine(params, static)
        ids = hax.named(batch["ids"], (batch_axis.resize(batch["ids"].shape[0]), place))
        x = net["norm"](net["embed"].embed(ids))
        keys = x.rename({"t": "s"})
        causal = hax.arange(place).broadcast_axis(place.alias("s")) >= hax.arange(place.alias("s"))
        x = x + hnn.attention.dot_product_attention("s", "d", x, keys, keys, mask=causal)
        logits = net["out"](x + net["mlp"](x)).rearrange(("b", "t", "w")).array
        return next_token_loss(logits, batch["ids"])

    return minimise(loss, params, optax.adam(1e-3), tokens(32, 10))


@model("keras jax", "convolutional network by stateless calls", "keras.optimizers.Adam", (SHARD, DATA, PIPE_1))
def keras_cnn() -> Training:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((8, 8, 3)), layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(),
            layers.LayerNormalization(), layers.SeparableConv2D(8, 2), layers.Flatten(), layers.Dense(4),
        ]
    )  # fmt: skip
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(net.trainable_variables)

    def step(state: Any, batch: Any) -> Any:
        trainable, others, optimizer_variables = state

        def loss_of(trainable: Any) -> Any:
            logits, new = net.stateless_call(trainable, others, batch["x"], training=True)
            return cross_entropy(logits, batch["y"]), new

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, grads, trainable)
        return (trainable, new, optimizer_variables), loss

    def values(variables: Any) -> Any:
        return [v.value for v in variables]

    state = values(net.trainable_variables), values(net.non_trainable_variables), values(optimizer.variables)
    return Training(step=step, state=state, batches=images(8, 4))


@model("rax optax", "learning to rank: listwise and pairwise losses", "adam")
def ranking() -> Training:
    import rax

    def loss(params: Any, batch: Any) -> jax.Array:
        scores = apply_tower(params, batch["x"])[..., 0]
        labels = batch["y"].astype(jnp.float32)
        lists = rax.softmax_loss(scores, labels) + rax.poly1_softmax_loss(scores, labels)
        return lists + rax.pairwise_logistic_loss(scores, labels, lambdaweight_fn=rax.dcg_lambdaweight)

    data = batches(lambda s: {"x": floats(N_EXAMPLES, 6, 5, seed=s), "y": integers(3, N_EXAMPLES, 6, seed=s + 1)})
    return minimise(loss, towers(5, 16, 1), optax.adam(1e-2), data)


@model("qwix flax optax", "linen MLP, quantised to int8 in training", "adam")
def quantised() -> Training:
    import flax.linen as nn
    import qwix

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(4)(nn.relu(nn.Dense(32)(x)))

    rules = [qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
    net = qwix.quantize_model(Net(), qwix.QtProvider(rules))
    params = net.init(KEY(0), jnp.zeros((N_EXAMPLES, 8)))

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((net.apply(params, batch["x"]) - batch["y"]) ** 2)

    return minimise(loss, params, optax.adam(1e-2), regression(8, 4))


@model("mamba2-jax flax optax", "Mamba 2", "adamw")
def mamba() -> Training:
    from flax import nnx
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=8, expand=2, head_dim=8, chunk_size=4,
    )  # fmt: skip
    graph, params, *others = nnx.split(Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, batch: Any) -> jax.Array:
        found = nnx.merge(graph, params, *others)(batch["ids"])
        return next_token_loss(found["logits"] if isinstance(found, dict) else found, batch["ids"])

    return minimise(loss, params, optax.adamw(1e-3), tokens(32, 8))


@model("spyx flax optax", "spiking network with surrogate gradients", "adam")
def spiking() -> Training:
    import spyx
    from flax import nnx

    rngs = nnx.Rngs(0)
    net = spyx.nn.LIF((16,), rngs=rngs), spyx.nn.LI((4,), rngs=rngs)
    graph, params, *others = nnx.split(net, nnx.Param, ...)

    def loss(params: Any, batch: Any) -> jax.Array:
        spiking, leaking = nnx.merge(graph, params["net"], *others)

        def one(potentials: Any, frame: Any) -> Any:
            spikes, first = spiking(apply_tower(params["in"], frame), potentials[0])
            out, last = leaking(apply_tower(params["out"], spikes), potentials[1])
            return (first, last), out

        n = batch["x"].shape[0]
        _, out = jax.lax.scan(one, (jnp.zeros((n, 16)), jnp.zeros((n, 4))), jnp.swapaxes(batch["x"], 0, 1))
        return cross_entropy(out.sum(0), batch["y"])

    data = batches(lambda s: {"x": floats(N_EXAMPLES, 8, 6, seed=s), "y": integers(4, N_EXAMPLES, seed=s + 1)})
    start = {"net": params, "in": towers(6, 16), "out": towers(16, 4, seed=3)}
    return minimise(loss, start, optax.adam(1e-2), data)


@model("jaxkan flax optax", "Kolmogorov-Arnold network", "adam")
def kolmogorov_arnold() -> Training:
    from flax import nnx
    from jaxkan.models.KAN import KAN

    graph, params, *others = nnx.split(KAN([4, 6, 2], "spline", {"k": 3, "G": 3}, 0), nnx.Param, ...)

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((nnx.merge(graph, params, *others)(batch["x"]) - batch["y"]) ** 2)

    return minimise(loss, params, optax.adam(1e-2), regression(4, 2))


@model("equimo equinox optax", "a vision transformer of equimo", "adamw")
def equimo_vit() -> Training:
    import equimo.models as models
    import equinox as eqx

    net = models.VisionTransformer(
        img_size=8, in_channels=3, dim=16, patch_size=4, num_heads=[2], depths=[2], num_classes=4, key=KEY(0)
    )
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        net, keys = eqx.combine(params, static), jax.random.split(key, batch["x"].shape[0])
        logits = jax.vmap(lambda x, k: net(x, key=k))(jnp.moveaxis(batch["x"], -1, 1), keys)
        return cross_entropy(logits, batch["y"])

    return minimise_noisy(loss, params, optax.adamw(1e-3), images(8, 4))


@model("jax", "MLP, Gauss-Newton directions by conjugate gradients", "written by hand", (SHARD, DATA, PIPE_1))
def gauss_newton() -> Training:
    def step(params: Any, batch: Any) -> Any:
        def outputs(params: Any) -> jax.Array:
            return apply_tower(params, batch["x"])

        loss, grads = jax.value_and_grad(lambda p: jnp.mean((outputs(p) - batch["y"]) ** 2))(params)

        def product(v: Any) -> Any:
            y, moved = jax.jvp(outputs, (params,), (v,))
            _, back = jax.vjp(outputs, params)
            (found,) = back(2 * moved / y.size)
            return jax.tree.map(lambda f, v: f + 0.1 * v, found, v)

        direction, _ = jax.scipy.sparse.linalg.cg(product, grads, maxiter=3)
        return jax.tree.map(lambda p, d: p - 0.1 * d, params, direction), loss

    return Training(step=step, state=towers(8, 16, 4), batches=regression(8, 4))
