"""Graphs in text form that the tests of texts and passes share."""
from __future__ import annotations

SOFTMAX = """
graph softmax(x: f32[b, n]) where 1 <= b, 1 <= n <= 4096
  m = amax(x | dims=[1], keep)    f32[b, 1]  # model.py:12
  d = sub(x, m)                   f32[b, n]
  e = exp(d)                      f32[b, n]
  s = sum(e | dims=[1], keep)     f32[b, 1]
  y = div(e, s)                   f32[b, n]  # model.py:12
  return y strides [n, 1]
"""

EVERYTHING = r"""
graph 0.forward(x: f32[b, n], y: bf16[4, 2*b + 1] strides [1, 4], k: size, t: i64[], w: f32[b, n])
    where 1 <= b, 1 <= n <= 4096, n near 512, 8 divides n, n - b >= 0, k near 3
  from tape x, k
  # a line of its own
  m = amax(x | dims=[1], keep)                 f32[b, 1]
  a = maximum(x, -inf)                         f32[b, n]
  c = add(x, -0.0)                             f32[b, n]
  d = add(x, nan)                              f32[b, n]
  e = add(x, 1e-30)                            f32[b, n]
  f = add(x, 3*b*(n//4) + max(b, n) - 2)       f32[b, n]
  g = add(x, -3)                               f32[b, n]
  h = mul(t, k)                                i64[]
  i = iota(| count=n, start=0, step=1, dtype="i64")    i64[n]
  j = cast(y | dtype="f64")                    f64[4, 2*b + 1]
  l = isnan(x)                                 bool[b, n]
  o = where(l, x, 0.1)                         f32[b, n]
  p = bit_and(l, True)                         bool[b, n]
  q, r = extern(x, k + 1, 2.5 | target="aten.x#\"y", template=[["args", ["operand", 0], ["none"], []],
      ["kwargs", ["v", ["float", inf]]]], effect=False)   f32[b, n], i64[n] strides [2]
  extern(x, q | target="aten.touch.default", template=[["args", None]], effect=1)
  z = permute(x | dims=[1, 0])                 f32[n, b]   # src/model.py:40 in forward
  write w <- o
  write x <- a
  save m, b*n, 3, k
  return z strides [1, n], None, b + 1, m, 1.5, k, True
"""

VIEWS = """
graph views(x: f32[b, n, 4], y: f32[1, n]) where 1 <= b, 2 <= n
  a = reshape(x | shape=[b*n, 4])                     f32[b*n, 4]
  c = reshape(a | shape=[b, n, 2, 2])                 f32[b, n, 2, 2]
  d = permute(c | dims=[0, 2, 1, 3])                  f32[b, 2, n, 2]
  e = permute(d | dims=[0, 2, 1, 3])                  f32[b, n, 2, 2]
  f = slice(e | dim=1, start=1, count=n - 1, step=1)  f32[b, n - 1, 2, 2]
  g = slice(f | dim=1, start=0, count=n//2, step=2)   f32[b, n//2, 2, 2]
  h = broadcast(y | shape=[1, 1, n])                  f32[1, 1, n]
  i = broadcast(h | shape=[b, 3, n])                  f32[b, 3, n]
  j = broadcast(i | shape=[b, 3, n])                  f32[b, 3, n]
  k = permute(y | dims=[1, 0])                        f32[n, 1]
  l = exp(g)                                          f32[b, n//2, 2, 2]
  return l, j, k, e
"""

ATTENTION = """
graph attention(q: f32[b, t, 64], k: f32[b, t, 64], v: f32[b, t, 64], mask: bool[t, t]) where 1 <= b, 1 <= t <= 2048
  one = full(1.0 | shape=[], dtype="f32")                  f32[]
  scale = full(8.0 | shape=[1], dtype="f32")               f32[1]
  wide = broadcast(scale | shape=[b, t, 64])               f32[b, t, 64]
  qs = div(q, wide)                                        f32[b, t, 64]
  kt = permute(k | dims=[0, 2, 1])                         f32[b, 64, t]
  s = matmul(qs, kt)                                       f32[b, t, t]
  inv = bit_not(mask)                                      bool[t, t]
  low = full(-inf | shape=[], dtype="f32")                 f32[]
  sm = where(inv, low, s)                                  f32[b, t, t]
  m = amax(sm | dims=[2], keep)                            f32[b, t, 1]
  d = sub(sm, m)                                           f32[b, t, t]
  d2 = sub(sm, m)                                          f32[b, t, t]
  e = exp(d)                                               f32[b, t, t]
  e2 = exp(d2)                                             f32[b, t, t]
  z = sum(e2 | dims=[2], keep)                             f32[b, t, 1]
  p = div(e, z)                                            f32[b, t, t]
  p1 = mul(p, one)                                         f32[b, t, t]
  o = matmul(p1, v)                                        f32[b, t, 64]
  dead = tanh(o)                                           f32[b, t, 64]
  return o
"""

SHARED = """
graph shared(x: f32[n], seed: i64[]) where 1 <= n
  a = mul(x, 1.0)                               f32[n]
  c = exp(x)                                    f32[n]
  d = exp(x)                                    f32[n]
  e = mul(d, 1)                                 f32[n]
  f = add(x, -0.0)                              f32[n]
  r = random(seed | shape=[n])                  f32[n]
  s = random(seed | shape=[n])                  f32[n]
  u = extern(x | target="aten.bernoulli.default", template=[["args", ["operand", 0]], ["kwargs"]], effect=1)  f32[n]
  v = extern(x | target="aten.bernoulli.default", template=[["args", ["operand", 0]], ["kwargs"]], effect=2)  f32[n]
  g = exp(x)                                    f32[n]
  h = sub(r, s)                                 f32[n]
  i = add(u, v)                                 f32[n]
  j = add(g, i)                                 f32[n]
  write x <- f
  save e
  return a, c, d, h, j
"""

NUMBERS = """
graph numbers(x: f32[b, n], i: i64[n], h: bf16[n], flag: bool[n]) where 1 <= b, 0 <= n
  c1 = full(0.1 | shape=[], dtype="f32")             f32[]
  c2 = full(3.0 | shape=[1], dtype="f32")            f32[1]
  c3 = mul(c1, c2)                                   f32[1]
  a = add(x, c3)                                     f32[b, n]
  z = full(0.0 | shape=[1], dtype="f32")             f32[1]
  c = add(a, z)                                      f32[b, n]
  c4 = full(-0.0 | shape=[1], dtype="f32")           f32[1]
  d = add(c, c4)                                     f32[b, n]
  s = full(n | shape=[], dtype="i64")                i64[]
  s1 = add(s, 1)                                     i64[]
  s2 = cast(s1 | dtype="f32")                        f32[]
  e = div(d, s2)                                     f32[b, n]
  g = iota(| count=n, start=0, step=1, dtype="i64")  i64[n]
  g1 = add(g, 5)                                     i64[n]
  g2 = mul(2, g1)                                    i64[n]
  g3 = sub(i, g2)                                    i64[n]
  g4 = add(g3, 7)                                    i64[n]
  g5 = add(g4, 8)                                    i64[n]
  hc = full(0.1 | shape=[n], dtype="bf16")           bf16[n]
  h1 = mul(h, hc)                                    bf16[n]
  h2 = cast(h1 | dtype="f32")                        f32[n]
  h3 = cast(h2 | dtype="bf16")                       bf16[n]
  h4 = cast(h3 | dtype="f32")                        f32[n]
  h5 = cast(x | dtype="bf16")                        bf16[b, n]
  h6 = cast(h5 | dtype="f32")                        f32[b, n]
  p = pow(x, 2)                                      f32[b, n]
  p1 = pow(x, 0.5)                                   f32[b, n]
  p2 = div(p, 3.0)                                   f32[b, n]
  t = full(True | shape=[n], dtype="bool")           bool[n]
  t1 = bit_and(flag, t)                              bool[n]
  t2 = bit_not(t1)                                   bool[n]
  t3 = bit_not(t2)                                   bool[n]
  w = where(t3, h4, 2.0)                             f32[n]
  return e, g2, g5, w, h6, p1, p2
"""

CONVOLUTIONS = """
graph convolutions(x: f32[b, 3, h, w], k: f32[8, 3, 3, 3], s: f32[8], l: f32[8, 8, 3, 3], m: f32[4, 8, 1, 1],
                   o: f32[4], p: f32[10, 8]) where 0 <= b, 4 <= h, 4 <= w
  a = extern(x, k, s | target="aten.convolution.default", template=[["args", ["operand", 0], ["operand", 1],
    ["operand", 2], ["list", ["int", 2], ["int", 2]], ["list", ["int", 1], ["int", 1]], ["list", ["int", 1]],
    ["bool", False], ["list", ["int", 0], ["int", 0]], ["int", 1]], ["kwargs"]],
    effect=False)  f32[b, 8, (h - 1)//2 + 1, (w - 1)//2 + 1]
  c = maximum(a, 0.0)                                f32[b, 8, (h - 1)//2 + 1, (w - 1)//2 + 1]
  d = extern(c, l | target="aten.convolution.default", template=[["args", ["operand", 0], ["operand", 1],
    ["none"], ["list", ["int", 1], ["int", 1]], ["list", ["int", 1], ["int", 1]], ["list", ["int", 1], ["int", 1]],
    ["bool", False], ["list", ["int", 0], ["int", 0]], ["int", 1]], ["kwargs"]],
    effect=False)  f32[b, 8, (h - 1)//2 + 1, (w - 1)//2 + 1]
  e = add(d, c)                                      f32[b, 8, (h - 1)//2 + 1, (w - 1)//2 + 1]
  f = pad(e | low=[0, 0, 1, 1], high=[0, 0, 0, 1], value=0.0)  f32[b, 8, (h - 1)//2 + 2, (w - 1)//2 + 3]
  g = slice(f | dim=2, start=0, count=(h - 1)//2 + 1, step=1)  f32[b, 8, (h - 1)//2 + 1, (w - 1)//2 + 3]
  i = slice(g | dim=3, start=1, count=(w - 1)//2 + 1, step=1)  f32[b, 8, (h - 1)//2 + 1, (w - 1)//2 + 1]
  j = concat(i, d | dim=1)                           f32[b, 16, (h - 1)//2 + 1, (w - 1)//2 + 1]
  q = sum(j | dims=[2, 3], keep=False)               f32[b, 16]
  r = extern(e, m, o | target="aten.convolution.default", template=[["args", ["operand", 0], ["operand", 1],
    ["operand", 2], ["list", ["int", 2], ["int", 2]], ["list", ["int", 0], ["int", 0]], ["list", ["int", 1]],
    ["bool", False], ["list", ["int", 0], ["int", 0]], ["int", 1]], ["kwargs"]],
    effect=False)  f32[b, 4, ((h - 1)//2)//2 + 1, ((w - 1)//2)//2 + 1]
  t = reshape(r |
    shape=[b, 4, (((h - 1)//2)//2 + 1)*(((w - 1)//2)//2 + 1)])  f32[b, 4, (((h - 1)//2)//2 + 1)*(((w - 1)//2)//2 + 1)]
  u = permute(t | dims=[0, 2, 1])                    f32[b, (((h - 1)//2)//2 + 1)*(((w - 1)//2)//2 + 1), 4]
  v = exp(u)                                         f32[b, (((h - 1)//2)//2 + 1)*(((w - 1)//2)//2 + 1), 4]
  return q, v
"""

CASES = {"softmax": SOFTMAX, "everything": EVERYTHING, "views": VIEWS, "attention": ATTENTION, "shared": SHARED,
         "numbers": NUMBERS, "convolutions": CONVOLUTIONS}
