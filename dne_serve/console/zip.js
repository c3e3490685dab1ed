// Read the files in a zip, which stays on the person's disk: only what is looked at is read.

const MAX_BYTES = 32 * 2 ** 20; // of a file in it
const END = 0x06054b50;
const ENTRY = 0x02014b50;
const END_BYTES = 22 + 65535; // with the longest comment

/** List the files in a zip, at most `most` of them: `path`, and `read`, which gives the file. */
export async function filesInZip(zip, most) {
  const tail = new DataView(await zip.slice(Math.max(0, zip.size - END_BYTES)).arrayBuffer());
  let at = tail.byteLength - 22;
  while (at >= 0 && tail.getUint32(at, true) !== END) at -= 1;
  if (at < 0) throw new Error(`${zip.name} is not a zip, or is cut off.`);
  const [bytes, start] = [tail.getUint32(at + 12, true), tail.getUint32(at + 16, true)];
  if (start === 0xffffffff || start + bytes > zip.size) throw new Error(`${zip.name} is damaged, or larger than 4 GiB.`);
  const list = new DataView(await zip.slice(start, start + bytes).arrayBuffer());
  const found = [];
  for (let place = 0; place + 46 <= list.byteLength && list.getUint32(place, true) === ENTRY && found.length <= most; ) {
    const [name, extra, comment] = [28, 30, 32].map((offset) => list.getUint16(place + offset, true));
    const path = new TextDecoder().decode(new Uint8Array(list.buffer, place + 46, Math.min(name, list.byteLength - place - 46)));
    const entry = {
      secret: list.getUint16(place + 8, true) & 1,
      method: list.getUint16(place + 10, true),
      packed: list.getUint32(place + 20, true),
      size: list.getUint32(place + 24, true),
      start: list.getUint32(place + 42, true),
    };
    if (!path.endsWith("/")) found.push({ path: path.split("/").filter(Boolean), read: () => read(zip, path, entry) });
    place += 46 + name + extra + comment;
  }
  return found;
}

async function read(zip, path, { secret, method, packed, size, start }) {
  if (secret || (method !== 0 && method !== 8)) throw new Error("It is encrypted, or packed in a way that browsers do not know.");
  if (Math.max(size, packed) > MAX_BYTES) throw new Error("It is larger than 32 MiB.");
  const head = new DataView(await zip.slice(start, start + 30).arrayBuffer());
  const from = start + 30 + head.getUint16(26, true) + head.getUint16(28, true);
  const bytes = zip.slice(from, from + packed);
  return new File(method === 8 ? await inflate(bytes, size) : [bytes], path.split("/").pop());
}

/** Inflate a file, and stop where it is longer than it says: some are made to fill the memory. */
async function inflate(bytes, size) {
  const reader = bytes.stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const pieces = [];
  for (let left = size; ; ) {
    const { done, value } = await reader.read();
    if (done) return pieces;
    left -= value.length;
    if (left < 0) throw new Error("It is longer than it says.");
    pieces.push(value);
  }
}
