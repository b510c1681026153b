"""minigpt: train, sample, resume and profile a GPT in JAX and Flax NNX, on one device or many.

    python minigpt.py                                   # learns a small story language in minutes
    python minigpt.py --mesh=4,2 --batch_size=144       # TinyStories-train.txt, on 8 devices
    python minigpt.py --mode=sample --prompt='One day'  # writes with the newest run

The mesh has two axes: `batch` splits the rows of a batch (data parallel), `model` splits attention
heads, MLP and vocabulary (tensor parallel), and --mesh alone chooses. Both are explicit: an array's
sharding is part of its type, and where shardings clash JAX says so instead of guessing.

    Flags        the command line; each default stands here and nowhere else
    Model        TransformerBlock, TokenAndPositionEmbedding, MiniGPT, create_model
    Data         text -> file of token ids -> windows -> shuffled batches
    Mesh         --mesh checked, simulated on CPUs, built
    Train step   loss fused with the output layer, AdamW, gradient accumulation
    Reports      log lines, metrics.csv, loss.png, profile
    Sampler      top-k sampling with a KV cache, in one compiled loop
    Checkpoint   saved in the background, restored onto any mesh
    Main         checks, set-up and the training loop

Capitals in names are shapes: B batch, T time (tokens), S T+1 or cached tokens, D embed_dim,
F feed_forward_dim, N heads, H head size, V vocabulary, C chunk of tokens, K top_k.
Not here: mixtures of experts, reinforcement learning, a server.
"""
import collections
import csv
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import time

from absl import app, flags, logging
from flax import nnx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tiktoken
from jax.sharding import PartitionSpec as P

# ---- Flags: only main reads them ----------------------------------------------------------------

flags.DEFINE_enum('mode', 'train', ['train', 'sample'],
                  'train (or resume) a run, or write text with its newest checkpoint')
flags.DEFINE_string('workdir', None, 'folder of the run; unset: runs/ and a name made of data, '
                    'model, batch and seed, or, to sample, the newest run there')
flags.DEFINE_bool('overwrite', False, 'delete the run in the workdir and start anew')
flags.DEFINE_integer('keep', 3, 'newest checkpoints kept', lower_bound=1)
flags.DEFINE_string('mesh', '-1,1', 'devices as batch,model; one may be -1: what is left. On CPUs '
                    'the devices are simulated')
flags.DEFINE_bool('fsdp', True, 'split parameters and optimizer state over the batch axis too')
flags.DEFINE_integer('num_transformer_blocks', 8, 'blocks', lower_bound=1)
flags.DEFINE_integer('maxlen', 256, 'tokens of context', lower_bound=2)
flags.DEFINE_integer('embed_dim', 256, 'width of embeddings and blocks', lower_bound=1)
flags.DEFINE_integer('num_heads', 8, 'attention heads a block', lower_bound=1)
flags.DEFINE_integer('feed_forward_dim', 256, 'width inside the MLP', lower_bound=1)
flags.DEFINE_float('dropout', 0.0, 'share of activations dropped in training; the tutorial has 0.1, '
                   'which costs time and helps only over many epochs', 0, 0.9)
flags.DEFINE_enum('dtype', 'auto', ['auto', 'float32', 'bfloat16'],
                  'of the compute; auto: bfloat16 on accelerators, float32 on CPUs')
flags.DEFINE_string('data', None, 'UTF-8 text, stories ended by <|endoftext|>; unset: '
                    'TinyStories-train.txt if it is in this folder, else a built-in story grammar')
flags.DEFINE_string('tokenizer', None, 'bytes, words (bytes and common words of the text) or a '
                    'tiktoken encoding; unset: gpt2 for a file, words for the grammar')
flags.DEFINE_integer('batch_size', None, 'windows a step over all devices and hosts; unset: 144 '
                     'for a file, 2 for the grammar', lower_bound=1)
flags.DEFINE_integer('accum_steps', 0, 'micro-batches a step, one after the other; 0: chosen from '
                     'batch, maxlen and mesh', lower_bound=0)
flags.DEFINE_integer('num_epochs', 1, 'times each window is seen', lower_bound=1)
flags.DEFINE_integer('max_steps', 0, 'steps in all; 0: as the epochs give', lower_bound=0)
flags.DEFINE_float('learning_rate', 2e-3, 'peak, after warm-up and before the cosine; the tutorial '
                   'has 1e-3 throughout, which learned slower', lower_bound=0)
flags.DEFINE_integer('warmup_steps', 20, 'steps of rising learning rate', lower_bound=0)
flags.DEFINE_float('weight_decay', 0.1, 'of AdamW, on matrices', lower_bound=0)
flags.DEFINE_float('clip_norm', 1.0, 'largest gradient norm', lower_bound=0)
flags.DEFINE_integer('seed', 42, 'of parameters, order, dropout and samples', lower_bound=0)
flags.DEFINE_integer('log_every', 10, 'steps between log lines', lower_bound=1)
flags.DEFINE_integer('eval_every', 200, 'steps between validations, each with a story; 0: only at '
                     'the end', lower_bound=0)
flags.DEFINE_integer('checkpoint_every', 200, 'steps between checkpoints; 0: only at the end',
                     lower_bound=0)
flags.DEFINE_integer('profile_steps', 0, 'steps to trace, after 5 steps of warm-up', lower_bound=0)
flags.DEFINE_string('prompt', 'Once upon a time', 'beginning of the text')
flags.DEFINE_integer('num_samples', 1, 'texts to write', lower_bound=1)
flags.DEFINE_integer('max_new_tokens', 0, 'tokens to write; 0: until end-of-text. Prompt and text '
                     'together end at maxlen tokens', lower_bound=0)
flags.DEFINE_integer('top_k', 10, 'draw from the k likeliest tokens; 0: from all', lower_bound=0)
flags.DEFINE_float('temperature', 1.0, '0: always the likeliest token', lower_bound=0)
flags.DEFINE_string('coordinator', None, 'host:port of process 0, or "auto" on TPU pods and Slurm')
flags.DEFINE_integer('num_processes', None, 'processes in all', lower_bound=1)
flags.DEFINE_integer('process_id', None, 'of this process, from 0', lower_bound=0)

# ---- Model: pre-LN GPT. Kernels are split over `model` by column, then by row, so that attention
# and MLP need one all-reduce each; over `batch` they are split for storage only (FSDP). ----------

RESIDUAL = P('batch', None, None)
normal = nnx.initializers.normal(0.02)


def split(shape, *axes):
    """Metadata that shards a parameter over mesh axes, each where it divides the dimension."""
    mesh = jax.sharding.get_abstract_mesh()
    return {'out_sharding': tuple(axis if axis and n % mesh.shape[axis] == 0 else None
                                  for n, axis in zip(shape, axes, strict=True))}


def attention(q_BTNH, k_BSNH, v_BSNH, index=0):
    """Causal attention of queries at positions index, index+1, ... to keys at 0, 1, ...: (B,T,N,H).

    Divides after the product with the values, one pass over (T, S) less than jax.nn.softmax.
    """
    q_BTNH *= q_BTNH.shape[-1] ** -0.5
    scores_BNTS = jnp.einsum('btnh,bsnh->bnts', q_BTNH, k_BSNH, preferred_element_type=jnp.float32)
    visible_TS = jnp.arange(k_BSNH.shape[1]) <= index + jnp.arange(q_BTNH.shape[1])[:, None]
    scores_BNTS = jnp.where(visible_TS, scores_BNTS, -jnp.inf)
    exp_BNTS = jnp.exp(scores_BNTS - jax.lax.stop_gradient(scores_BNTS.max(-1, keepdims=True)))
    out_BTNH = jnp.einsum('bnts,bsnh->btnh', exp_BNTS.astype(v_BSNH.dtype), v_BSNH,
                          preferred_element_type=jnp.float32)
    return (out_BTNH / exp_BNTS.sum(-1).swapaxes(1, 2)[..., None]).astype(v_BSNH.dtype)


class TransformerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, embed_dim, num_heads, feed_forward_dim, dropout, dtype, rngs):
        D, N, H, F = embed_dim, num_heads, embed_dim // num_heads, feed_forward_dim
        options = dict(use_bias=False, kernel_init=normal, dtype=dtype, rngs=rngs)
        self.norm1 = nnx.LayerNorm(D, dtype=dtype, rngs=rngs)
        self.qkv = nnx.LinearGeneral(D, (3, N, H), **options, kernel_metadata=split(
            (D, 3, N, H), 'batch', None, 'model', None))
        self.out = nnx.LinearGeneral((N, H), D, axis=(-2, -1), **options, kernel_metadata=split(
            (N, H, D), 'model', None, 'batch'))
        self.norm2 = nnx.LayerNorm(D, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(D, F, **options, kernel_metadata=split((D, F), 'batch', 'model'))
        self.down = nnx.Linear(F, D, **options, kernel_metadata=split((F, D), 'model', 'batch'))
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, x_BTD, cache=None, index=0, rngs=None):
        """Returns the new x_BTD and the block's (keys, values), each (B, S, N, H).

        Without a cache the T tokens attend to each other: training, or filling in a prompt. With
        one, they stand at positions index, index+1, ... of it: decoding. Dropout needs rngs.
        """
        drop = functools.partial(self.dropout, deterministic=rngs is None, rngs=rngs)
        qkv = self.qkv(self.norm1(x_BTD), out_sharding=P('batch', None, None, 'model', None))
        q_BTNH, k_BSNH, v_BSNH = (qkv[:, :, i] for i in range(3))
        if cache is not None:
            k_BSNH, v_BSNH = (jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=1)
                              for old, new in zip(cache, (k_BSNH, v_BSNH)))
        out_BTNH = attention(q_BTNH, k_BSNH, v_BSNH, index)
        x_BTD += drop(self.out(out_BTNH, out_sharding=RESIDUAL))
        up_BTF = nnx.relu(self.up(self.norm2(x_BTD), out_sharding=P('batch', None, 'model')))
        return x_BTD + drop(self.down(up_BTF, out_sharding=RESIDUAL)), (k_BSNH, v_BSNH)


class TokenAndPositionEmbedding(nnx.Module):
    """The sum of a learned vector for each token and one for each position."""

    def __init__(self, maxlen, vocab_size, embed_dim, dtype, rngs):
        tokens, positions = (vocab_size, embed_dim), (maxlen, embed_dim)
        self.token_emb = nnx.Param(normal(rngs.params(), tokens), **split(tokens, 'batch', 'model'))
        self.pos_emb = nnx.Param(normal(rngs.params(), positions), **split(positions, None, 'batch'))
        self.dtype = dtype

    def __call__(self, ids_BT, index=0):
        token_BTD = self.token_emb[...].at[ids_BT].get(out_sharding=RESIDUAL)
        pos_TD = jax.lax.dynamic_slice_in_dim(self.pos_emb[...], index, ids_BT.shape[1])
        return (token_BTD + pos_TD).astype(self.dtype)


class MiniGPT(nnx.Module):
    """Everything up to the output layer, which loss and sampler apply in their own ways."""

    def __init__(self, vocab_size, maxlen, embed_dim, num_heads, feed_forward_dim,
                 num_transformer_blocks, dropout, dtype, rngs):
        self.embedding_layer = TokenAndPositionEmbedding(maxlen, vocab_size, embed_dim, dtype, rngs)
        self.transformer_blocks = nnx.List(
            TransformerBlock(embed_dim, num_heads, feed_forward_dim, dropout, dtype, rngs)
            for _ in range(num_transformer_blocks))
        self.norm = nnx.LayerNorm(embed_dim, dtype=dtype, rngs=rngs)
        output = (vocab_size, embed_dim)
        self.output_layer = nnx.Param(normal(rngs.params(), output), **split(output, 'model', 'batch'))

    def __call__(self, ids_BT, caches=None, index=0, rngs=None):
        """Returns x_BTD, to be multiplied by output_layer (V, D), and the blocks' caches."""
        x_BTD, new_caches = self.embedding_layer(ids_BT, index), []
        for block, cache in zip(self.transformer_blocks, caches or itertools.repeat(None)):
            x_BTD, cache = block(x_BTD, cache, index, rngs)
            new_caches.append(cache)
        return self.norm(x_BTD), new_caches


def create_model(seed, vocab_size, fsdp=True, **settings):
    """MiniGPT, its vocabulary padded, each parameter made where it belongs and nowhere whole."""
    padded = -(-vocab_size // 128) * 128   # 50257 is odd: no `model` axis could split it
    return jax.jit(lambda: MiniGPT(padded, **settings, rngs=nnx.Rngs(seed)))()


def gather(model):
    """The model with its parameters whole over `batch`, as the forward pass needs them."""
    def whole(a):
        axes = jax.typeof(a).sharding.spec
        return jax.reshard(a, P(*(None if axis == 'batch' else axis for axis in axes)))
    return jax.tree.map(whole, model)


# ---- Data: a text becomes one stream of token ids in a memory-mapped file, cut into windows: no
# slot is padding, and a text of any size needs little memory. --------------------------------------

END = '<|endoftext|>'
WORDS = r' ?[^\W\d_]+| ?[^\s\w]|\s|\d|_'   # a word with its leading space, or one other character
BLOCK, HEADER = 1 << 22, 512               # characters read at a time; bytes before the ids
STORY = ('Once upon a time there was a {mood} {animal} named {name}. {name} lived in the {place} and '
         'loved to {play}. One day {name} found a {color} {thing} near the {place}. Then a {feeling} '
         '{friend} came by. {name} gave the {color} {thing} to the {friend}. The {friend} was not '
         '{feeling} any more and they {deed} until the night.')
CHOICES = {name: words.split() for name, words in dict(
    mood='little brave happy shy clever sleepy hungry kind', play='run jump swim climb dance sing dig hide',
    animal='dog cat fox hen bear duck frog mouse', name='Max Lily Tom Mia Sam Zoe Ben Anna',
    place='forest garden village park meadow barn valley jungle', color='red blue green white yellow pink golden silver',
    thing='ball key cake hat scarf drum coin pillow', feeling='sad lost tired cold angry lonely scared bored',
    friend='bird rabbit turtle squirrel goat pony bee owl', deed='laughed talked walked danced rested sat smiled cooked'
).items()}
# Choices are single words, each as likely, so every story has 64 tokens (END among them) and the
# entropy is exact: no model can have a smaller loss on windows of whole stories.
ENTROPY = sum(math.log(len(words)) for words in CHOICES.values()) / 64   # nats a token
GRAMMAR_STORIES = 3200


def grammar_stories():
    """Yields the built-in stories, always the same ones."""
    rng = random.Random(0)
    for _ in range(GRAMMAR_STORIES):
        yield STORY.format(**{name: rng.choice(words) for name, words in CHOICES.items()}) + END


def file_stories(path):
    """Yields the stories of a text, stripped and with END; those longer than BLOCK in pieces."""
    rest = ''
    with open(path, encoding='utf-8-sig') as file:   # takes any line ending, and a byte-order mark
        while block := read_text(file, BLOCK):
            *stories, rest = (rest + block).split(END)
            yield from (story.strip() + END for story in stories if story.strip())
            while len(rest) > BLOCK:
                cut = max(rest.rfind(' ', 0, BLOCK), 0) or BLOCK   # tokens end before a space
                yield rest[:cut]
                rest = rest[cut:]
    if rest.strip():
        yield rest.strip() + END


def read_text(file, size):
    """The next characters of a text file; exits where its bytes are not UTF-8."""
    try:
        return file.read(size)
    except UnicodeDecodeError as error:
        at = file.buffer.tell() - len(error.object) + error.start
        sys.exit(f'{file.name} is not UTF-8 text: {error.reason} at byte {at}.')


def load_tokenizer(name, words=()):
    """tiktoken.Encoding: one of its own by name, or 256 bytes and `words` as tokens."""
    if name in ('bytes', 'words'):
        tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
        return tiktoken.Encoding(name, pat_str=WORDS, special_tokens={END: len(tokens)},
                                 mergeable_ranks={token: i for i, token in enumerate(tokens)})
    if name not in (known := tiktoken.list_encoding_names()):
        sys.exit(f'--tokenizer={name} is not one of bytes, words, {", ".join(known)}.')
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        sys.exit(f'The files of --tokenizer={name} cannot be downloaded ({type(error).__name__}): set '
                 'TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer=words.')


def common_words(stories, most=4096):
    """The most frequent words of the first BLOCK characters."""
    counts, size = collections.Counter(), 0
    for story in itertools.takewhile(lambda _: size < BLOCK, stories):
        counts.update(word for word in re.findall(WORDS, story.removesuffix(END)) if len(word) > 1)
        size += len(story)
    return [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]]


def write_tokens(path, stories, tokenizer, source, say):
    """Writes END and the stories as ids, in bounded memory, whole or not at all."""
    dtype = np.dtype('uint16' if tokenizer.n_vocab <= 1 << 16 else 'uint32')
    digest, count, pieces, stories = hashlib.sha256(), 0, [END], iter(stories)
    part = path.with_name(f'{path.name}.{os.getpid()}.part')
    try:
        with open(part, 'wb') as file:
            file.write(b' ' * HEADER)
            while pieces:
                lists = tokenizer.encode_batch(pieces, num_threads=os.cpu_count(),
                                               allowed_special={END}, disallowed_special=())
                ids = np.fromiter(itertools.chain.from_iterable(lists), dtype)
                file.write(ids.tobytes())
                digest.update(ids.tobytes())
                count += ids.size
                pieces = list(itertools.islice(stories, 4096))
                say(f'{path}: {count:,} tokens', end='\r' if pieces else '\n')
            file.seek(0)
            file.write(json.dumps(source | dict(
                dtype=dtype.name, count=count, digest=digest.hexdigest()[:16])).encode().ljust(HEADER))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def open_tokens(path, source):
    """(ids, digest) of a token file made from this source, memory-mapped; None if it is not."""
    try:
        with open(path, 'rb') as file:
            meta = json.loads(file.read(HEADER))
        ids = np.memmap(path, meta['dtype'], 'r', HEADER)
    except (OSError, ValueError, KeyError):
        return None
    return (ids, meta['digest']) if source.items() <= meta.items() and ids.size == meta['count'] else None


def load_tokens(data, tokenizer, workdir, say):
    """(ids, digest) of the text (None: the grammar), tokenised unless that is done already.

    The token file lies beside the text, or in the workdir if it can't be written there.
    """
    folders, stories, source = [workdir], grammar_stories(), {'grammar': ENTROPY}
    if data:
        stat = data.stat()
        folders, stories = [data.parent, workdir], file_stories(data)
        source = {'bytes': stat.st_size, 'modified': stat.st_mtime_ns}
    tokens = hashlib.sha256(b'\n'.join(tokenizer.token_byte_values())).hexdigest()[:16]
    source |= {'format': 1, 'tokenizer': tokens}
    name = f'{data.name if data else "grammar"}.{tokenizer.name}.tokens'
    for folder in folders:
        if found := open_tokens(folder / name, source):
            return found
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_tokens(folder / name, stories, tokenizer, source, say)
            return open_tokens(folder / name, source)
        except OSError as error:
            problem = f'{folder / name} cannot be written: {error.strerror}.'
    sys.exit(problem)


class TextDataset:
    """Grain random access source of windows: maxlen tokens and the one that follows them."""

    def __init__(self, ids, maxlen, windows):
        self.ids, self.maxlen, self.windows = ids, maxlen, windows

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, i):
        start = self.windows[i] * self.maxlen
        return self.ids[start:start + self.maxlen + 1].astype(np.int32)


def split_windows(ids, maxlen, batch_size):
    """(training, held-out) TextDataset: the last tenth, at most 64 windows, is never trained on."""
    windows = range((ids.size - 1) // maxlen)
    held_out = min(64, -(-len(windows) // 10))
    training = len(windows) - held_out
    if training < batch_size:
        sys.exit(f'{ids.size} tokens give {training} windows of {maxlen} to train on, fewer than '
                 f'one batch of {batch_size}: use more text, or a smaller --batch_size or --maxlen.')
    return (TextDataset(ids, maxlen, windows[:training]), TextDataset(ids, maxlen, windows[training:]))


def training_batches(dataset, batch_size, seed, start):
    """Endless iterator of (B, S) batches from step `start`; seed and step alone decide them."""
    batches = grain.MapDataset.source(dataset).seed(seed).shuffle().repeat().batch(batch_size)
    return iter(batches[start:].to_iter_dataset(grain.ReadOptions(1, 4)))


def to_devices(batch_BS):
    """The batch split over `batch`; each process hands over only the rows that its devices hold."""
    sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), P('batch', None))
    return jax.make_array_from_callback(batch_BS.shape, sharding, lambda rows: batch_BS[rows])


# ---- Mesh: (batch, model) devices, simulated where a machine has only CPUs -----------------------

def mesh_shape(text, devices, simulated):
    """(batch, model) of --mesh for that many devices; exits where they do not fit.

    A simulated mesh may leave devices unused, accelerators must all be used.
    """
    if not re.fullmatch(r'(-1|[1-9]\d*),(-1|[1-9]\d*)', text) or text == '-1,-1':
        sys.exit(f'--mesh={text} is not batch,model, such as 4,2, or -1,2 for all devices.')
    batch, model = map(int, text.split(','))
    known = max(batch, 1) * max(model, 1)
    batch, model = (max(1, devices // known) if n == -1 else n for n in (batch, model))
    if batch * model > devices or (batch * model < devices and not simulated):
        model = math.gcd(model, devices)
        sys.exit(f'--mesh={text} needs {known} devices, this machine has {devices}: '
                 f'use {devices // model},{model} or -1,{model}.')
    return batch, model


def create_mesh(text, processes=1):
    """Makes the mesh of --mesh the current one. Explicit axes: shardings are part of types."""
    wanted = math.prod(int(n) for n in re.findall(r'\d+', text.replace('-1', '')))
    simulate = 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', '')
    if simulate and wanted // processes > jax.config.jax_num_cpu_devices:
        try:
            jax.config.update('jax_num_cpu_devices', wanted // processes)
        except RuntimeError:   # JAX has begun with the devices that it has
            pass
    shape = mesh_shape(text, jax.device_count(), jax.devices()[0].platform == 'cpu')
    mesh = jax.make_mesh(shape, ('batch', 'model'), axis_types=(jax.sharding.AxisType.Explicit,) * 2,
                         devices=jax.devices()[:math.prod(shape)])
    jax.set_mesh(mesh)
    return mesh


def check_divides(part, part_name, whole, whole_name):
    """Exits unless the whole is a multiple of the part."""
    if whole % part:
        fits = sorted({max(part, whole // part * part), -(-whole // part) * part})
        sys.exit(f'{whole_name}={whole} does not divide by {part_name}={part}: '
                 f'use {" or ".join(map(str, fits))}.')


def choose_accum_steps(batch_size, maxlen, mesh):
    """Micro-batches of at most 2,048 tokens a device on CPUs, whose caches are small, else 65,536.

    Shapes and mesh alone decide, since a resumed run has to add up in the same order.
    """
    rows = batch_size // mesh.shape['batch']
    most = 2048 if mesh.devices.flat[0].platform == 'cpu' else 65536
    return next(n for n in range(1, rows + 1)
                if rows % n == 0 and (rows // n * maxlen <= most or n == rows))


# ---- Train step: logits (B, T, V) would be by far the largest array, so the loss makes them for a
# chunk of tokens at a time, and finds the gradients in the same pass. -------------------------------

CHUNK = 512   # tokens; from 128 to 2048 made no difference


def token_losses(x_BTD, w_VD, y_BT, vocab_size, with_grads=False):
    """Softmax cross-entropy with logits x @ w.T, per token: (B, T) float32, nats.

    Each device of the `model` axis holds some rows of w; pmax and psum put the softmax together
    (Megatron-LM, arXiv:1909.08053). Rows from vocab_size on are padding and take no part.
    With grads, returns (losses, dx, dw), the gradients being those of the sum of the losses.
    """
    def local(x_BTD, w_VD, y_BT):
        (n_rows, D), n = w_VD.shape, y_BT.size
        size = min((c for c in range(1, n + 1) if n % c == 0), key=lambda c: abs(math.log(c / CHUNK)))
        first = jax.lax.axis_index('model') * n_rows
        real_V = first + jnp.arange(n_rows) < vocab_size
        kernel_VD, y_BT = w_VD.astype(x_BTD.dtype), y_BT - first

        def chunk(dw_VD, xy):
            x_CD, y_C = xy
            logits_CV = jnp.matmul(x_CD, kernel_VD.T, preferred_element_type=jnp.float32)
            logits_CV = jnp.where(real_V, logits_CV, -jnp.inf)
            top_C = jax.lax.pmax(logits_CV.max(-1), 'model')
            exp_CV = jnp.exp(logits_CV - top_C[:, None])
            target_CD = kernel_VD.at[y_C].get(mode='fill', fill_value=0, wrap_negative_indices=False)
            target_C = jnp.einsum('cd,cd->c', x_CD, target_CD, preferred_element_type=jnp.float32)
            sum_C, target_C = jax.lax.psum((exp_CV.sum(-1), target_C), 'model')
            loss_C = top_C + jnp.log(sum_C) - target_C
            if not with_grads:
                return dw_VD, (loss_C, None)
            # d loss / d logits is exp / sum - onehot. Its two parts meet w and x apart from each
            # other, which saves passes over (C, V); the onehot part of dw follows after the scan.
            exp_CV = exp_CV.astype(x_CD.dtype)
            dx_CD = jax.lax.psum((exp_CV @ kernel_VD) / sum_C[:, None] - target_CD, 'model')
            scaled_CD = (x_CD / sum_C[:, None]).astype(x_CD.dtype)
            dw_VD += jnp.matmul(exp_CV.T, scaled_CD, preferred_element_type=jnp.float32)
            return dw_VD, (loss_C, dx_CD.astype(x_CD.dtype))

        zeros = jnp.zeros(w_VD.shape if with_grads else ())
        dw_VD, (losses, dx) = jax.lax.scan(
            chunk, jax.lax.pcast(zeros, ('batch', 'model') if with_grads else (), to='varying'),
            (x_BTD.reshape(-1, size, D), y_BT.reshape(-1, size)))
        if not with_grads:
            return losses.reshape(y_BT.shape)
        dw_VD = dw_VD.at[y_BT.reshape(n)].add(-x_BTD.reshape(n, D).astype(jnp.float32), mode='drop',
                                              wrap_negative_indices=False)
        return losses.reshape(y_BT.shape), dx.reshape(x_BTD.shape), jax.lax.psum(dw_VD, 'batch')

    w_spec, y_spec = P('model', None), P('batch', None)
    return jax.shard_map(local, in_specs=(RESIDUAL, w_spec, y_spec),
                         out_specs=(y_spec, RESIDUAL, w_spec) if with_grads else y_spec)(x_BTD, w_VD, y_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(x_BTD, w_VD, y_BT, vocab_size):
    """The mean of token_losses, which brings its own gradients."""
    return token_losses(x_BTD, w_VD, y_BT, vocab_size).mean()


def cross_entropy_forward(x_BTD, w_VD, y_BT, vocab_size):
    losses_BT, dx_BTD, dw_VD = token_losses(x_BTD, w_VD, y_BT, vocab_size, with_grads=True)
    return losses_BT.mean(), (dx_BTD, dw_VD, y_BT.size)


def cross_entropy_backward(vocab_size, saved, g):
    dx_BTD, dw_VD, n = saved
    return (dx_BTD * (g / n)).astype(dx_BTD.dtype), dw_VD * (g / n), None


cross_entropy.defvjp(cross_entropy_forward, cross_entropy_backward)


def loss_fn(model, ids_BS, vocab_size, dropout_key=None):
    """Mean loss over the windows, nats a token: each token is predicted from those before it."""
    rngs = None if dropout_key is None else nnx.Rngs(dropout=dropout_key)
    x_BTD, _ = model(ids_BS[:, :-1], rngs=rngs)
    return cross_entropy(x_BTD, model.output_layer[...], ids_BS[:, 1:], vocab_size)


def create_schedule(peak, warmup_steps, total_steps):
    """Learning rate by step: linear warm-up to the peak, then a cosine down to a tenth of it."""
    warmup_steps = min(warmup_steps, total_steps - 1)
    return optax.warmup_cosine_decay_schedule(peak / (warmup_steps + 1), peak, warmup_steps,
                                              total_steps, peak / 10)


def create_optimizer(model, schedule, weight_decay, clip_norm):
    """Clipping and AdamW, whose state is split as the parameters are."""
    tx = optax.chain(optax.clip_by_global_norm(clip_norm), optax.adamw(
        schedule, b2=0.95, weight_decay=weight_decay,
        mask=lambda params: jax.tree.map(lambda a: a.ndim > 1, params)))
    return jax.jit(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))(model)


@functools.partial(jax.jit, donate_argnames=('model', 'optimizer'),
                   static_argnames=('vocab_size', 'accum_steps', 'dropout'))
def train_step(model, optimizer, ids_BS, key, *, vocab_size, accum_steps, dropout):
    """One update; returns model, optimizer, and loss and gradient norm (before clipping).

    Modules are pytrees here: jax.jit takes and gives them, and donation updates them in place.
    Micro-batches run one after the other, so that only one has its activations in memory; those
    peak besides parameters and optimizer state, not the logits.
    """
    whole, key = gather(model), jax.random.fold_in(key, optimizer.step[...])

    def add(sums, micro_batch):
        i, ids_BS = micro_batch
        found = jax.value_and_grad(loss_fn)(
            whole, ids_BS, vocab_size, jax.random.fold_in(key, i) if dropout else None)
        return jax.tree.map(jnp.add, sums, found), None

    ids_BAS = ids_BS.reshape(-1, accum_steps, ids_BS.shape[1], out_sharding=P('batch', None, None))
    micro_batches = jnp.arange(accum_steps), ids_BAS.swapaxes(0, 1)
    (loss, grads), _ = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, whole)), micro_batches)
    # Each device goes on with its own part of the gradients and updates its part of the parameters.
    grads = jax.tree.map(
        lambda g, p: jax.reshard(g / accum_steps, jax.typeof(p).sharding.spec), grads, model)
    optimizer.update(model, grads)
    return model, optimizer, {'loss': loss / accum_steps, 'grad_norm': optax.global_norm(jax.tree.leaves(grads))}


@functools.partial(jax.jit, static_argnames='vocab_size')
def eval_step(model, ids_BS, *, vocab_size):
    """Mean loss of each window: (B,) nats a token, dropout off."""
    model = gather(model)
    x_BTD, _ = model(ids_BS[:, :-1])
    losses_BT = token_losses(x_BTD, model.output_layer[...], ids_BS[:, 1:], vocab_size)
    return jax.reshard(losses_BT.mean(-1), P())


def evaluate(model, held_out, rows, vocab_size):
    """Mean loss of the held-out windows, nats a token, `rows` at a time."""
    count, losses = len(held_out), []
    for start in range(0, count, rows):   # the last batch is filled up with windows from the front
        batch_BS = np.stack([held_out[i % count] for i in range(start, start + rows)])
        losses.append(eval_step(model, to_devices(batch_BS), vocab_size=vocab_size))
    return np.concatenate(jax.device_get(losses))[:count].mean()


# ---- Reports: read from the device one step late, so that it never waits for Python. -----------

COLUMNS = ('step', 'loss', 'grad_norm', 'learning_rate', 'tokens_per_s', 'val_loss')


def say(text, end='\n', file=None):
    """Prints, in process 0 alone; a line that ends in \r is for terminals only."""
    file = file or sys.stdout
    if jax.process_index() == 0 and (end == '\n' or file.isatty()):
        print(text, end=end, file=file, flush=True)


def read_metrics(path):
    """The rows of metrics.csv, as dictionaries of text."""
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


class Report:
    """Log lines and rows of metrics.csv, for the steps that are logged or validated."""

    def __init__(self, path, start, total, batch_tokens, schedule):
        self.path, self.total, self.batch_tokens, self.schedule = path, total, batch_tokens, schedule
        self.pending, self.last, self.paused = None, None, 0.0
        old = [row for row in read_metrics(path) if int(row['step']) < start] if path.exists() else []
        self.write('w', COLUMNS, *(row.values() for row in old))

    def write(self, mode, *rows):
        if jax.process_index() == 0:
            with open(self.path, mode, newline='') as file:
                csv.writer(file, lineterminator='\n').writerows(rows)

    def add(self, step, metrics, val_loss=None):
        """Takes a step's numbers, to be read when the next step has been sent to the device."""
        self.pending = step, metrics, val_loss

    def flush(self):
        """Prints and writes what was added, once the device has it."""
        if not self.pending:
            return
        (step, metrics, val_loss), self.pending = self.pending, None
        row = dict.fromkeys(COLUMNS, '') | {'step': step} | jax.device_get(metrics)
        now, line = time.perf_counter() - self.paused, f'step {step}/{self.total}'
        if metrics:
            row['learning_rate'] = np.float32(self.schedule(step))
            line += f' | loss {row["loss"]:.4f} | grad {row["grad_norm"]:.2f} | lr {row["learning_rate"]:.1e}'
            if self.last:
                rate = (step - self.last[0]) * self.batch_tokens / (now - self.last[1])
                row['tokens_per_s'] = round(rate, 1)
                left = int((self.total - step) * self.batch_tokens / rate)
                line += f' | {rate / 1e3:.2f}k tok/s | eta {left // 60}m{left % 60:02d}s'
            self.last = step, now
        if val_loss is not None:
            row['val_loss'] = val_loss
            line += f' | val {val_loss:.4f}'
        say(line)
        self.write('a', row.values())


def plot_loss(workdir, floor, floor_name):
    """Draws loss.png from metrics.csv: training loss, raw and smoothed, validation loss, a floor."""
    import matplotlib.figure   # slow to import; a bare Figure needs no display
    axes = (figure := matplotlib.figure.Figure(figsize=(8, 5))).add_subplot()
    points = {name: np.array([(int(row['step']), float(row[name]))
                              for row in read_metrics(workdir / 'metrics.csv') if row[name]]).reshape(-1, 2)
              for name in ('loss', 'val_loss')}
    steps, losses = points['loss'].T
    axes.plot(steps, losses, color='0.75', label='training, each logged batch')
    width = max(1, len(losses) // 20)
    if len(losses):
        axes.plot(steps[width - 1:], np.convolve(losses, np.full(width, 1 / width), 'valid'),
                  color='tab:blue', label=f'training, mean of {width}')
    axes.plot(*points['val_loss'].T, 'o-', color='black', label='validation')
    axes.axhline(floor, linestyle='--', color='tab:red', label=f'{floor_name}, {floor:.3f}')
    axes.set(xlabel='step', ylabel='loss (nats a token)', title=workdir.name)
    axes.legend()
    figure.savefig(workdir / 'loss.part.png', dpi=120)
    os.replace(workdir / 'loss.part.png', workdir / 'loss.png')


# ---- Sampler: one pass fills in the prompt, then a token a pass against the KV cache, in one loop
# whose shapes know nothing of the prompt: it compiles once. -----------------------------------------

@functools.partial(jax.jit, static_argnames=('vocab_size', 'end', 'top_k'))
def generate_tokens(model, ids_BT, start, stop, key, temperature, *, vocab_size, end, top_k):
    """ids_BT, filled from position `start` on until all rows have an `end` or reach `stop`."""
    model = gather(model)

    def next_token(x_BD, index):
        logits_BV = jnp.einsum('bd,vd->bv', x_BD, model.output_layer[...].astype(x_BD.dtype),
                               preferred_element_type=jnp.float32, out_sharding=P('batch', 'model'))
        logits_BV = jax.reshard(logits_BV, P())[:, :vocab_size]   # no padded ids
        top_BK, ids_BK = jax.lax.top_k(logits_BV, min(top_k or vocab_size, vocab_size))
        # argmax(logits + temperature * Gumbel noise) draws from softmax(logits / temperature)
        noise_BK = jax.random.gumbel(jax.random.fold_in(key, index), top_BK.shape)
        best_B1 = jnp.argmax(top_BK + temperature * noise_BK, axis=1, keepdims=True)
        return jax.reshard(jnp.take_along_axis(ids_BK, best_B1, axis=1), P('batch', None))

    def body(carry):
        index, x_BD, ids_BT, caches, ended_B1 = carry
        token_B1 = next_token(x_BD, index)
        ids_BT = jax.lax.dynamic_update_slice_in_dim(ids_BT, token_B1, index, axis=1)
        x_B1D, caches = model(token_B1, caches, index)
        return index + 1, x_B1D[:, 0], ids_BT, caches, ended_B1 | (token_B1 == end)

    x_BTD, caches = model(ids_BT)
    x_BD = jax.lax.dynamic_index_in_dim(x_BTD, start - 1, axis=1, keepdims=False)
    ended_B1 = jnp.zeros_like(ids_BT[:, :1], bool)
    carry = jax.lax.while_loop(lambda carry: (carry[0] < stop) & ~carry[-1].all(), body,
                               (start, x_BD, ids_BT, caches, ended_B1))
    return jax.reshard(carry[2], P())


def generate_text(model, tokenizer, prompt, maxlen, *, num_samples, max_new_tokens, top_k,
                  temperature, seed):
    """Texts that begin with the prompt, up to end-of-text, max_new_tokens (0: any) or maxlen tokens.

    The same seed gives the same texts. Exits where the prompt leaves no room for a token.
    """
    end = tokenizer.eot_token   # every story in the token stream follows one, so the prompt does too
    prompt_ids = [end] + tokenizer.encode_ordinary(prompt)
    start, batch = len(prompt_ids), jax.sharding.get_mesh().shape['batch']
    if start >= maxlen:
        sys.exit(f'The prompt has {start - 1} tokens; maxlen={maxlen} leaves room for {maxlen - 2}, '
                 'one for end-of-text and one to write: shorten --prompt.')
    stop = min(maxlen, start + (max_new_tokens or maxlen))
    ids_BT = np.zeros((-(-num_samples // batch) * batch, maxlen), np.int32)
    ids_BT[:, :start] = prompt_ids
    ids_BT = np.asarray(generate_tokens(
        model, to_devices(ids_BT), start, stop, jax.random.key(seed), temperature,
        vocab_size=tokenizer.n_vocab, end=end, top_k=top_k))
    texts = []
    for ids in ids_BT[:num_samples, 1:stop].tolist():
        ids = ids[:start - 1] + list(itertools.takewhile(lambda i: i != end, ids[start - 1:]))
        texts.append(tokenizer.decode_bytes(ids).decode(errors='replace').rstrip('\ufffd'))
    return texts   # the rstrip drops half a character at the cut


# ---- Checkpoint: parameters, optimizer state (its step included) and configuration. Order of the
# data and random keys follow from seed and step, so there is no other state to lose. --------------

def open_checkpoints(workdir, keep, read_only=False):
    """Orbax manager that saves in the background and keeps the newest checkpoints."""
    return ocp.CheckpointManager((workdir / 'checkpoints').absolute(), options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, read_only=read_only, cleanup_tmp_directories=not read_only))


def state_of(module):
    return nnx.to_pure_dict(nnx.state(module))


def save_checkpoint(manager, step, model, optimizer, config):
    """Copies the state and returns; Orbax writes it to a temporary folder and renames that."""
    if step not in manager.all_steps():
        manager.save(step, args=ocp.args.Composite(
            model=ocp.args.StandardSave(state_of(model)), config=ocp.args.JsonSave(config),
            optimizer=ocp.args.StandardSave(state_of(optimizer))))


def read_config(manager, step):
    """The configuration in a checkpoint."""
    return manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config


def restore(manager, step, **modules):
    """Fills modules (model=..., optimizer=...), each array read straight into its sharding."""
    for name, module in modules.items():
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
                              state_of(module))
        found = manager.restore(step, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(target)}))
        nnx.update(module, found[name])


# ---- Main: checks, set-up, and a loop that waits for the device only to report -------------------

SIGNALS = []   # those that came; each asks the loop to save and stop


def stop_on(number, frame):
    SIGNALS.append(number)
    signal.signal(number, signal.SIG_DFL)   # a second one ends the process at once
    say(f'{signal.Signals(number).name}: stopping after this step and a checkpoint')


def train_loop(model, optimizer, step, total, next_step, validate, save, report, due):
    """Trains from `step` to `total` or a signal; returns the step where it stopped."""
    while True:
        val_loss = validate(model, step) if due('eval', step) or step == total else None
        stopping = step == total or SIGNALS
        if due('checkpoint', step) or stopping:
            save(step, model, optimizer)
        if stopping:
            report.add(step, {}, val_loss)
            report.flush()
            return step
        model, optimizer, metrics = next_step(model, optimizer)
        report.flush()
        if due('log', step) or val_loss is not None:
            report.add(step, metrics, val_loss)
        step += 1


def find_run(workdir):
    """The folder to sample from: --workdir, or the run in runs/ with the newest checkpoint."""
    runs = [workdir] if workdir else sorted(
        pathlib.Path('runs').glob('*'), key=lambda run: os.path.getmtime(run / 'checkpoints'))
    return runs[-1]


def parse_flags(argv):
    """Parses the command line; any error in it is one line and exit status 1."""
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f'{error} See --help.')
    if rest[1:]:
        sys.exit(f'Stray argument {rest[1]!r}: flags begin with --, as in --mesh=4,2.')
    return rest


def sample(F):
    """--mode=sample: the model, its tokenizer and settings come from the run's checkpoint."""
    run = pathlib.Path(F.workdir) if F.workdir else max(
        pathlib.Path('runs').glob('*/checkpoints'), key=os.path.getmtime, default=pathlib.Path('runs/x')).parent
    manager = open_checkpoints(run, F.keep, read_only=True) if (run / 'checkpoints').is_dir() else None
    step = manager and manager.latest_step()
    if step is None:
        sys.exit(f'{run} has no checkpoint to sample from: train first, or name another --workdir.')
    config = read_config(manager, step)
    say(f'{run}, step {step}', file=sys.stderr)
    tokenizer = load_tokenizer(config['tokenizer'], config['words'])
    mesh = create_mesh(F.mesh)
    model = create_model(0, tokenizer.n_vocab, dtype=compute_dtype(F.dtype, mesh), fsdp=F.fsdp, **config['model'])
    restore(manager, step, model=model)
    texts = generate_text(model, tokenizer, F.prompt, config['model']['maxlen'], num_samples=F.num_samples,
                          max_new_tokens=F.max_new_tokens, top_k=F.top_k, temperature=F.temperature, seed=F.seed)
    print('\n\n'.join(texts), flush=True)


def compute_dtype(name, mesh):
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    return jnp.dtype({'auto': 'float32' if on_cpu else 'bfloat16'}.get(name, name))


def train(F):
    """--mode=train."""
    data = pathlib.Path(F.data).expanduser() if F.data else pathlib.Path('TinyStories-train.txt')
    if F.data and not data.is_file():
        sys.exit(f'--data={F.data}: no such file.')
    data = data if data.is_file() else None
    name = F.tokenizer or ('gpt2' if data else 'words')
    mesh = create_mesh(F.mesh, F.num_processes or 1)
    batch = mesh.shape['batch']
    batch_size = F.batch_size or -(-(144 if data else 2) // batch) * batch
    accum_steps = F.accum_steps or choose_accum_steps(batch_size, F.maxlen, mesh)
    check_divides(batch * accum_steps, 'the batch axis x --accum_steps', batch_size, '--batch_size')
    check_divides(F.num_heads, '--num_heads', F.embed_dim, '--embed_dim')
    for size, what in ((F.num_heads, '--num_heads'), (F.feed_forward_dim, '--feed_forward_dim'),
                       (128, 'unit of the padded vocabulary')):
        check_divides(mesh.shape['model'], 'the model axis', size, what)
    workdir = pathlib.Path(F.workdir or f'runs/{data.stem if data else "grammar"}-{F.num_transformer_blocks}x'
                           f'{F.embed_dim}-b{batch_size}-s{F.seed}')
    if F.overwrite:
        shutil.rmtree(workdir, ignore_errors=True)
    say(f'data: {data or "built-in story grammar"} | workdir: {workdir}')
    words = []
    if name == 'words':
        words = common_words(file_stories(data) if data else grammar_stories())
    tokenizer = load_tokenizer(name, words)
    ids, digest = load_tokens(data, tokenizer, workdir, say)
    training, held_out = split_windows(ids, F.maxlen, batch_size)
    total = F.max_steps or len(training) * F.num_epochs // batch_size
    settings = {name: F[name].value for name in (
        'maxlen', 'embed_dim', 'num_heads', 'feed_forward_dim', 'num_transformer_blocks', 'dropout')}
    config = {'model': settings, 'tokenizer': name, 'words': words, 'data': digest, 'batch_size': batch_size,
              'seed': F.seed, 'accum_steps': accum_steps}
    devices = mesh.devices.flat[0]
    say(f'mesh: {mesh.shape["batch"]} batch x {mesh.shape["model"]} model, {mesh.size} {devices.device_kind} devices'
        + (' simulated on this machine' if devices.platform == 'cpu' and mesh.size > 1 else ''))
    model = create_model(F.seed, tokenizer.n_vocab, dtype=compute_dtype(F.dtype, mesh), fsdp=F.fsdp, **settings)
    schedule = create_schedule(F.learning_rate, F.warmup_steps, total)
    optimizer = create_optimizer(model, schedule, F.weight_decay, F.clip_norm)
    params = sum(a.size for a in jax.tree.leaves(model))
    say(f'{params:,} parameters | {ids.size:,} tokens | {len(training):,} windows to train on, {len(held_out)} held out'
        f' | {total:,} steps of {batch_size} x {F.maxlen} tokens in {accum_steps} micro-batches')
    manager = open_checkpoints(workdir, F.keep)
    start = manager.latest_step() or 0
    if start:
        old = read_config(manager, start)
        for key in config:
            if old[key] != config[key]: sys.exit(f'{workdir} holds a run with {key}={old[key]}, not {config[key]}: other --workdir or --overwrite')
        restore(manager, start, model=model, optimizer=optimizer)
        say(f'resuming at step {start}')
    if start >= total:
        say(f'{workdir} is finished at step {start}: --max_steps above that goes on, --overwrite starts anew.')
        return
    batches = training_batches(training, batch_size, F.seed, start)
    say('compiling the train step ...', end='\n')
    began = time.time()
    key = jax.random.key(F.seed)
    batch_shape = jax.ShapeDtypeStruct((batch_size, F.maxlen + 1), np.int32, sharding=jax.sharding.NamedSharding(mesh, P('batch', None)))
    compiled = train_step.lower(model, optimizer, batch_shape, key, vocab_size=tokenizer.n_vocab, accum_steps=accum_steps, dropout=F.dropout > 0).compile()
    say(f'compiled in {time.time() - began:.1f} s')
    report = Report(workdir / 'metrics.csv', start, total, batch_size * F.maxlen, schedule)
    floor = (ENTROPY, 'entropy of the grammar') if not data else (math.log(tokenizer.n_vocab), 'ln of the vocabulary')

    def validate(model, step):
        report.flush()
        jax.block_until_ready(model.output_layer[...])
        began = time.perf_counter()
        val_loss = evaluate(model, held_out, batch_size // accum_steps, tokenizer.n_vocab)
        text, = generate_text(model, tokenizer, F.prompt, F.maxlen, num_samples=1, max_new_tokens=F.max_new_tokens,
                              top_k=F.top_k, temperature=F.temperature, seed=F.seed)
        say(f'\n--- step {step}, validation loss {val_loss:.4f} ({floor[1]} {floor[0]:.4f}) ---\n{text}\n')
        plot_loss(workdir, *floor)
        report.paused += time.perf_counter() - began
        return val_loss

    def save(step, model, optimizer):
        report.flush()
        save_checkpoint(manager, step, model, optimizer, config)

    def next_step(model, optimizer):
        return compiled(model, optimizer, to_devices(next(batches)), key)

    every = {'log': F.log_every, 'eval': F.eval_every, 'checkpoint': F.checkpoint_every}
    due = lambda what, step: every[what] and step % every[what] == 0 and (what != 'checkpoint' or step > start)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_on)
    step = train_loop(model, optimizer, start, total, next_step, validate, save, report, due)
    manager.wait_until_finished()
    plot_loss(workdir, *floor)
    say(f'stopped at step {step}: checkpoint in {workdir}')
    if SIGNALS:
        sys.exit(128 + SIGNALS[0])


def main(argv):
    F = flags.FLAGS
    logging.set_verbosity(logging.ERROR)
    (train if F.mode == 'train' else sample)(F)


if __name__ == '__main__':
    app.run(main, flags_parser=parse_flags)
