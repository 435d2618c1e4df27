/*
 * struct page and the struct folio overlay: 64 bytes a page, Linux 6.18 and later on a 64-bit machine.
 *
 * Laws of the layout
 *   - A page is its PFN. mem_map[pfn] is the page; no field of it ever holds an address: links, mappings and device
 *     maps are PFNs or small ids, so that a saved mem_map is plain bytes and means the same in another process.
 *   - sizeof(struct page) == 64, one cache line, naturally aligned and without holes. That is the same sequence of
 *     bytes as a packed struct, but the compiler knows the counters to be aligned, so that atomics on them are one
 *     instruction and no warning about packed members is needed.
 *   - Bit 0 of the word at offset 8 belongs to the tail mark. Every other user of that word stores even values.
 *   - A page that is free, or was never used, is no tail and has _refcount 0: whoever tries to take a reference on it
 *     is refused. Frames never used are 64 zero bytes; frames freed are the same with _mapcount -1 and the zone bits.
 *
 * The tail word
 *     word(order) = (~0 << (order + 6)) | 1
 *   is a mask in units of bytes of mem_map, as in Linux 7.1, with the tail mark in bit 0. A look-up of the head is
 *     head = ((pfn << 6) & (((word & 1) - 1) | word)) >> 6
 *   which needs no branch (a page that is no tail masks with all ones) and no base address, because folios are
 *   naturally aligned in PFN space. The order of the folio is ctz(word & ~1) - 6.
 *
 * The overlay
 *   A folio of order >= 1 uses the first words of its tails as well: struct folio below is four pages long. Tail 1 is
 *   there from order 1 on, tails 2 and 3 from order 2 on; nobody reads them on smaller folios.
 */
#ifndef MMCORE_PAGE_H
#define MMCORE_PAGE_H

#include <stddef.h>
#include <stdint.h>

struct page {
	uint64_t flags;			/*  0: PG_* in the low bits; node and zone in the high bits */
	union {
		struct {
			uint64_t lru_next;	/*  8: PFN link; bit 0 clear */
			uint64_t lru_prev;	/* 16 */
		};
		uint64_t compound_info;		/*  8: the tail word, see above */
		uint64_t pgmap;			/*  8: ZONE_DEVICE heads: id of the device map << 1 */
	};
	uint64_t mapping;		/* 24: id of what is mapped; bit 0 anon, bit 1 KSM; TAIL_MAPPING in tails from 3 on */
	uint64_t index;			/* 32: offset in the mapping; share count of fsdax */
	uint64_t private_;		/* 40 */
	union {
		int32_t _mapcount;	/* 48: mappings - 1 */
		uint32_t page_type;	/* 48: PGTY_* in the top byte, when not mapped */
	};
	int32_t _refcount;		/* 52 */
	uint64_t memcg_data;		/* 56 */
};

struct folio {
	struct page page;		/*   0: the head */
	/* tail 1 */
	uint64_t _flags_1;		/*  64: order in the low 8 bits; SECOND flags */
	uint64_t _head_1;		/*  72: tail word */
	int32_t _large_mapcount;	/*  80: mappings of any page - 1 */
	int32_t _nr_pages_mapped;	/*  84 */
	int32_t _entire_mapcount;	/*  88: PMD or PUD mappings - 1 */
	int32_t _pincount;		/*  92: FOLL_PIN pins */
	int32_t _mm_id_mapcount[2];	/*  96 */
	uint32_t _mm_id[2];		/* 104 */
	int32_t _mapcount_1;		/* 112 */
	int32_t _refcount_1;		/* 116: always 0 */
	uint32_t _nr_pages;		/* 120 */
	uint32_t _unused_1;		/* 124 */
	/* tail 2 */
	uint64_t _flags_2;		/* 128 */
	uint64_t _head_2;		/* 136 */
	uint64_t _deferred_list[2];	/* 144: PFN links, orders > 1 */
	uint64_t _unused_2[4];		/* 160 */
	/* tail 3 */
	uint64_t _flags_3;		/* 192 */
	uint64_t _head_3;		/* 200 */
	uint64_t _hugetlb_subpool;	/* 208 */
	uint64_t _hugetlb_cgroup;	/* 216 */
	uint64_t _hugetlb_cgroup_rsvd;	/* 224 */
	uint64_t _hugetlb_hwpoison;	/* 232 */
	uint64_t _unused_3[2];		/* 240 */
};

#define MMCORE_AT(type, field, offset) \
	_Static_assert(offsetof(struct type, field) == (offset), #type "." #field " is not at " #offset)

_Static_assert(sizeof(struct page) == 64, "struct page is one cache line");
MMCORE_AT(page, flags, 0);
MMCORE_AT(page, lru_next, 8);
MMCORE_AT(page, compound_info, 8);
MMCORE_AT(page, pgmap, 8);
MMCORE_AT(page, lru_prev, 16);
MMCORE_AT(page, mapping, 24);
MMCORE_AT(page, index, 32);
MMCORE_AT(page, private_, 40);
MMCORE_AT(page, _mapcount, 48);
MMCORE_AT(page, page_type, 48);
MMCORE_AT(page, _refcount, 52);
MMCORE_AT(page, memcg_data, 56);

_Static_assert(sizeof(struct folio) == 4 * sizeof(struct page), "struct folio overlays four pages");
MMCORE_AT(folio, page, 0);
MMCORE_AT(folio, _flags_1, 64);
MMCORE_AT(folio, _head_1, 64 + offsetof(struct page, compound_info));
MMCORE_AT(folio, _large_mapcount, 80);
MMCORE_AT(folio, _nr_pages_mapped, 84);
MMCORE_AT(folio, _entire_mapcount, 88);
MMCORE_AT(folio, _pincount, 92);
MMCORE_AT(folio, _mm_id_mapcount, 96);
MMCORE_AT(folio, _mm_id, 104);
MMCORE_AT(folio, _mapcount_1, 64 + offsetof(struct page, _mapcount));
MMCORE_AT(folio, _refcount_1, 64 + offsetof(struct page, _refcount));
MMCORE_AT(folio, _nr_pages, 120);
MMCORE_AT(folio, _flags_2, 128);
MMCORE_AT(folio, _head_2, 128 + offsetof(struct page, compound_info));
MMCORE_AT(folio, _deferred_list, 144);
MMCORE_AT(folio, _flags_3, 192);
MMCORE_AT(folio, _head_3, 192 + offsetof(struct page, compound_info));
MMCORE_AT(folio, _hugetlb_subpool, 208);
MMCORE_AT(folio, _hugetlb_cgroup, 216);
MMCORE_AT(folio, _hugetlb_cgroup_rsvd, 224);
MMCORE_AT(folio, _hugetlb_hwpoison, 232);

/* Lock-free atomics need natural alignment; a counter must also not straddle a cache line. */
_Static_assert(_Alignof(struct page) == 8, "64-bit words of struct page are naturally aligned");
_Static_assert(offsetof(struct page, _refcount) % sizeof(int32_t) == 0, "_refcount is aligned");
_Static_assert(offsetof(struct folio, _pincount) % sizeof(int32_t) == 0, "_pincount is aligned");

#endif
