/*
 * Scatterlist building and copying in plain C, as peers for the engine's: the same 32-byte entries, the same chunks of
 * 128 slots with links, the same array of PFNs. bench_sg.py compiles this with the flags of the extension and calls it
 * without the GIL. Chunks are cut from one warm arena, so that no allocator is measured.
 *
 *	peer_build_twice	counts the entries, then fills them, page by page: the kernel's way
 *	peer_build_once		the engine's way: one pass, run by run, the last chunk cut to size
 *	peer_copy		one memcpy of n bytes
 *	peer_walk		the pages of a table, one step each: the kernel's iterator
 *
 * The builders return the number of entries.
 */
#include <stdint.h>
#include <string.h>

struct sg {
	uint64_t page_link;
	uint32_t offset, length;
	uint64_t dma_address;
	uint32_t dma_length, dma_flags;
};

#define SG_CHAIN 1
#define SG_END 2
#define CHUNK 128
#define PAGE_SHIFT 12

_Static_assert(sizeof(struct sg) == 32, "entries are those of the engine");

static inline void put(struct sg *sg, uint64_t pfn, uint64_t nr)
{
	sg->page_link = pfn << 2;
	sg->offset = 0;
	sg->length = (uint32_t)(nr << PAGE_SHIFT);
	sg->dma_address = 0;
	sg->dma_length = 0;
	sg->dma_flags = 0;
}

int64_t peer_build_twice(const uint64_t *pfns, uint64_t n, uint64_t max_pages, struct sg *arena)
{
	uint64_t entries = 1, start = 0, i, k, need, size = 0, used = 0;
	struct sg *sg = arena - 1, *end = 0;

	for (i = 1; i < n; i++) {
		if (pfns[i] != pfns[i - 1] + 1 || i - start >= max_pages) {
			entries++;
			start = i;
		}
	}
	for (i = 0, k = 0; k < entries; k++) {
		uint64_t first = i;

		for (i++; i < n && pfns[i] == pfns[i - 1] + 1 && i - first < max_pages; i++)
			;
		need = entries - k;
		if (end && (sg + 1 != end || need == 1)) {
			sg++;
		} else {
			size = need < CHUNK ? need : CHUNK;
			if (end) {
				memset(end, 0, sizeof(*end));
				end->page_link = (uint64_t)(uintptr_t)(arena + used) | SG_CHAIN;
			}
			sg = arena + used;
			memset(sg, 0, size * sizeof(*sg));
			used += size;
			end = sg + size - 1;
			end->page_link = SG_END;
		}
		put(sg, pfns[first], i - first);
	}
	sg->page_link |= SG_END;
	return (int64_t)entries;
}

static inline uint64_t run_of(const uint64_t *p, uint64_t n)
{
	uint64_t k = 1, j, different, first = p[0];

	if (n < 2 || p[1] != first + 1)
		return 1;
	for (; k + 32 <= n && p[k + 31] == first + k + 31; k += 32) {
		different = 0;
		for (j = 0; j < 32; j++)
			different |= p[k + j] ^ (first + k + j);
		if (different)
			break;
	}
	for (; k + 8 <= n && p[k + 7] == first + k + 7; k += 8) {
		different = 0;
		for (j = 0; j < 8; j++)
			different |= p[k + j] ^ (first + k + j);
		if (different)
			break;
	}
	while (k < n && p[k] == first + k)
		k++;
	return k;
}

int64_t peer_build_once(const uint64_t *pfns, uint64_t n, uint64_t max_pages, struct sg *arena)
{
	uint64_t i = 0, entries = 0, used = 0;
	struct sg *sg = arena - 1, *end = arena - 1;

	while (i < n) {
		uint64_t pfn, nr;

		for (; i + 1 < n && sg != end && pfns[i + 1] != pfns[i] + 1; i++, entries++)
			put(++sg, pfns[i], 1);
		pfn = pfns[i];
		nr = run_of(pfns + i, n - i);

		i += nr;
		while (nr) {
			uint64_t take = nr < max_pages ? nr : max_pages;

			if (sg == end) {
				struct sg *chunk = arena + used;

				used += CHUNK;
				if (entries) {
					*chunk = *sg;
					memset(sg, 0, sizeof(*sg));
					sg->page_link = (uint64_t)(uintptr_t)chunk | SG_CHAIN;
					sg = chunk;
				}
				end = chunk + CHUNK - 1;
			}
			put(++sg, pfn, take);
			entries++;
			pfn += take;
			nr -= take;
		}
	}
	sg->page_link |= SG_END;
	return (int64_t)entries;
}

int64_t peer_copy(void *to, const void *from, uint64_t n)
{
	memcpy(to, from, n);
	return (int64_t)n;
}

/* The sum keeps the compiler from leaving the walk out. */
int64_t peer_walk(const struct sg *sg, uint64_t nents)
{
	uint64_t sum = 0, pgoffset = 0;

	while (nents && sg) {
		uint64_t pages = ((uint64_t)sg->offset + sg->length + (1 << PAGE_SHIFT) - 1) >> PAGE_SHIFT;

		if (pgoffset < pages) {
			sum += (sg->page_link >> 2) + pgoffset++;
			continue;
		}
		pgoffset = 0;
		nents--;
		if (sg->page_link & SG_END)
			break;
		sg++;
		if (sg->page_link & SG_CHAIN)
			sg = (const struct sg *)(uintptr_t)(sg->page_link & ~3ULL);
	}
	return (int64_t)sum;
}
